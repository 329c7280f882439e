"""Location of files that can be recomputed."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return draftstore's folder of this name under `XDG_CACHE_HOME`, by default ~/.cache; it need not exist."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "draftstore" / name


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the user's home; as in containers, that is / for users without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path.replace("~", "", 1))
