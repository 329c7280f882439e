"""Identities of files: the SHA-256 of their content, kept for large files so that it is read once.

Small files are read every time. Of a large one, the hash is kept in `~/.cache/draftstore/hashes`, and holds while size,
inode and both times of the file are as they were: the time of modification can be set back, that of the last change of
its inode cannot. A copy that looks new is thus read again and found equal.
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
"""Age of a change from which on the times tell another change: clocks of file systems tick."""


def file_identity(path: Path, *, rehash: bool = False) -> str:
    """Return the SHA-256 of a file; of one that cannot be read, its size and time."""
    stat = path.stat()
    state = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    try:
        if stat.st_size <= SMALL_BYTES:
            return hash_file(path)
        kept = _kept_hash(path)
        if not rehash and (found := _read(kept)) is not None and found.get("state") == state:
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
    """Return where the hash of a file is kept."""
    return cache_folder("hashes") / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"


def _read(kept: Path) -> dict[str, object] | None:
    """Return a kept hash; None if there is none, or it is damaged."""
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("sha256"), str) else None
