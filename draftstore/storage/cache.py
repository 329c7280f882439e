"""Location of files that can be recomputed."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return draftstore's folder of this name under `XDG_CACHE_HOME`, by default ~/.cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftstore" / name
