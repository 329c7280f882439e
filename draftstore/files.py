"""Files that are either whole or absent: atomic writes, hashes, directories published by a rename."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftstore.errors import BuildError

HASH_CHUNK = 1 << 22


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hexadecimal digits, reading it in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that a crash leaves the old one or the new one, never a mixture."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def publish_directory(finished: Path, target: Path) -> None:
    """Flush a finished directory to disk and give it its final name.

    An earlier `target` is moved aside first and removed last, so that `target` is a whole store at every
    moment but the one between two renames.
    """
    for path in sorted(finished.rglob("*")):
        fsync_path(path)
    fsync_path(finished)
    retired = target.with_name(f".{target.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if target.exists():
        target.rename(retired)
    finished.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


@contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Create `path` and hold it for this process; the lock goes with the process, however it ends.

    Raises:
        BuildError: another process holds it.
    """
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(f"another build is at work in {path}: wait for it, or choose another --out") from None
        yield
    finally:
        os.close(descriptor)
