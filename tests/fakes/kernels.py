"""Compiled kernels that are cached on disk and do not know their sources."""

from contextlib import suppress
from pathlib import Path


def remove_stale_kernels(package: Path) -> None:
    """Remove compiled kernels that are older than any file of kernels of a package.

    numba looks at the file of the outermost kernel alone: an edit of an inner one would change nothing.
    """
    sources = [path for path in package.rglob("*.py") if "jit import" in path.read_text(encoding="utf-8")]
    newest = max(path.stat().st_mtime for path in [*sources, *package.glob("jit.py")])
    for kept in package.rglob("__pycache__/*.nb[ic]"):
        with suppress(FileNotFoundError):  # another process does the same
            if kept.stat().st_mtime < newest:
                kept.unlink()
