"""Atomic files: writes, hashes, publishing by rename, and locks."""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildRunningError, StoreError
from draftstore.jit import read_only

HASH_CHUNK = 1 << 22
LOCK_SECONDS = 1.0
"""Time to wait for a lock: a process that a killed build was starting holds it until it runs its own program."""


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


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside a file: what the block writes there is flushed to disk and takes the file's place.

    After a crash, the file has the old or the new content; after an exception in the block, the old one. `mode` sets
    the permissions before a byte is written, less the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if mode is not None:
            temporary.touch(mode)
        yield temporary
        fsync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file atomically: after a crash it has the old or the new content."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_at(path: Path, array: NDArray[Any], item: int) -> None:
    """Write an array into a file at an item offset, and flush it to disk."""
    with path.open("r+b") as file:
        file.seek(item * array.itemsize)
        file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file of a store as a flat read-only array; StoreError if it is empty or cut."""
    try:
        return read_only(np.memmap(path, dtype, "r"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be mapped ({error}): the store is damaged, build it again") from None


def map_or_empty(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file as `map_file`; an empty one, which cannot be mapped, gives an empty array."""
    return map_file(path, dtype) if path.stat().st_size else read_only(np.empty(0, dtype))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an immutable file, or copy it if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def json_text(value: Any) -> str:
    """Return indented JSON with sorted keys: equal values are equal bytes. Non-UTF-8 bytes of a path stay escaped."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode() + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write a small JSON file atomically, as `json_text`."""
    write_atomic(path, json_text(value).encode())


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def retired_name(target: Path) -> Path:
    """Return the temporary name of a directory that `publish` replaces."""
    return target.with_name(f".{target.name}.retired")


def publish(finished: Path, target: Path) -> None:
    """Flush a finished directory or file to disk and give it its final name; `target` is complete at any time.

    Only while an old directory is replaced, it is missing between two renames.
    """
    for path in sorted(finished.rglob("*")):
        fsync_path(path)
    fsync_path(finished)
    retired = retired_name(target)
    if finished.is_dir() and os.path.lexists(target):
        remove(retired)
        target.rename(retired)
    finished.rename(target)
    fsync_path(target.parent)
    with suppress(OSError):  # the new one is in place; leftovers of the old one are harmless
        remove(retired)


@contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Create `path` and lock it for this process; the lock ends with the process, however that happens.

    The holder may remove the directory before releasing the lock. Raises BuildRunningError if another process holds it.
    """
    end = time.monotonic() + LOCK_SECONDS
    while (descriptor := _try_lock(path, last=time.monotonic() >= end)) is None:
        time.sleep(0.01)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path, *, last: bool) -> int | None:
    """Return the descriptor of the locked directory; None to try again, unless this was the last time."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except BlockingIOError:
        if last:
            os.close(descriptor)
            raise BuildRunningError(
                f"another build is running in {path}: wait for it, or choose another --out"
            ) from None
    except FileNotFoundError:
        pass  # its last holder has just removed it
    os.close(descriptor)
    return None
