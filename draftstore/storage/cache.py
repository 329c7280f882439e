"""The place of files that can be computed again."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder of draftstore under `XDG_CACHE_HOME`, by default ~/.cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "draftstore" / name
