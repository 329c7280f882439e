"""Identities of files: the SHA-256 of their content, cached for large files so that they are read once.

Small files are read every time. The hash of a large one is cached in `~/.cache/draftstore/hashes` and valid while its
size, inode, mtime and ctime are unchanged: the mtime can be set back, the ctime cannot. A copy with a new ctime is thus
read again and found equal.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from draftstore.storage.cache import cache_folder
from draftstore.storage.files import hash_file, write_json

SMALL_BYTES = 1 << 20
"""Size up to which files are read every time."""
SETTLED_NS = 2 * 10**9
"""Minimum age of a change for the times to reveal a later one: file system timestamps are coarse."""


def file_identity(path: Path) -> str:
    """Return the SHA-256 of a file, or its size and mtime if it cannot be read."""
    stat = path.stat()
    state = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    try:
        if stat.st_size <= SMALL_BYTES:
            return hash_file(path)
        kept = _kept_hash(path)
        if (found := _read(kept)) is not None and found.get("state") == state:
            return str(found["sha256"])
        digest = hash_file(path)
    except OSError:
        return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    if time.time_ns() - stat.st_ctime_ns > SETTLED_NS:
        with suppress(OSError):  # without it the file is read again
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"path": str(path), "state": state, "sha256": digest})
    return digest


def _kept_hash(path: Path) -> Path:
    return cache_folder("hashes") / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"


def _read(kept: Path) -> dict[str, object] | None:
    """Return a cached hash, or None if it is missing or damaged."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("sha256"), str) else None
