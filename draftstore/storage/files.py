"""Files: identities by content, permissions, atomic writes, publishing by rename, and locked directories."""

import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import InstanceOf, TypeAdapter, ValidationError

from draftstore.errors import BuildRunningError, StoreError
from draftstore.storage.locks import lock

T = TypeVar("T")
AnyText: TypeAlias = InstanceOf[str]
"""A string field that may be invalid Unicode, as file names can be."""
HASH_CHUNK = 1 << 22
LOCK_SECONDS = 1.0
"""Time to wait for a lock: a child of a killed build inherits it and holds it until its exec."""
SMALL_BYTES = 1 << 20
"""Size up to which `file_identity` reads a file every time."""
SETTLED_NS = 2 * 10**9
"""Minimum age of a change for the times to reveal a later one: file system timestamps are coarse."""
_READABLE = ((stat.S_IRGRP, stat.S_IRWXG), (stat.S_IROTH, stat.S_IRWXO))


def cache_folder(name: str) -> Path:
    """Return draftstore's folder of this name under `XDG_CACHE_HOME`, by default ~/.cache; it need not exist."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "draftstore" / name


def expanded(path: str) -> Path:
    """Return a path with `~` replaced by the user's home; as in containers, that is / for users without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path.replace("~", "", 1))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hexadecimal digits, reading it in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def file_identity(path: Path) -> str:
    """Return the SHA-256 of a file, or its size and mtime if it cannot be read.

    The hash of a large file is cached in `~/.cache/draftstore/hashes` and valid while its size, inode, mtime and ctime
    are unchanged: the mtime can be set back, the ctime cannot. A copy with a new ctime is read again and found equal.
    """
    status = path.stat()
    state = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    try:
        if status.st_size <= SMALL_BYTES:
            return hash_file(path)
        kept = cache_folder("hashes") / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"
        if (found := _cached_hash(kept)) is not None and found.get("state") == state:
            return str(found["sha256"])
        digest = hash_file(path)
    except OSError:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    if time.time_ns() - status.st_ctime_ns > SETTLED_NS:
        with suppress(OSError):  # without it the file is read again
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"path": str(path), "state": state, "sha256": digest})
    return digest


def _cached_hash(kept: Path) -> dict[str, object] | None:
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("sha256"), str) else None


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside a file; after the block, it is flushed to disk and replaces the file.

    After a crash, the file has the old or the new content; after an exception in the block, the old one. `mode`, less
    the umask, sets the permissions before a byte is written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
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
    """Write an array to a file at an item offset, and flush it to disk."""
    with path.open("r+b") as file:
        file.seek(item * array.itemsize)
        file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def map_file(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file of a store as a flat read-only array; StoreError if it is empty or truncated."""
    try:
        return np.asarray(np.memmap(path, dtype, "r"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be mapped ({error}): the store is damaged, build it again") from None


def map_or_empty(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file as `map_file` does; return an empty array for an empty file, which cannot be mapped."""
    return map_file(path, dtype) if path.stat().st_size else np.frombuffer(b"", dtype)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an immutable file, or copy it if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def escaped(text: str) -> str:
    """Return valid Unicode: non-UTF-8 bytes of a path are escaped."""
    return text.encode(errors="backslashreplace").decode()


def json_text(value: Any) -> str:
    """Return indented JSON with sorted keys: equal values give equal bytes; see `escaped`."""
    return escaped(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)) + "\n"


def load_json(text: str | bytes, kind: TypeAdapter[T]) -> T:
    """Parse a JSON document as a value of some type; a ValueError states the problem, a wrong version first."""
    try:
        return kind.validate_python(json.loads(text))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        problem = next((each for each in problems if "format_version" in each["loc"]), problems[0])
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{place}: {problem['msg']}" if place else problem["msg"]) from None


def write_json(path: Path, value: Any) -> None:
    """Write a small file atomically as `json_text`."""
    write_atomic(path, json_text(value).encode())


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def publish(finished: Path, target: Path, replaced: Path) -> None:
    """Flush a finished directory to disk and give it its final name; `target` is complete whenever it exists.

    An existing `target` is first renamed to `replaced`; it is missing between the two renames.
    """
    for path in sorted(finished.rglob("*")):
        fsync_path(path)
    fsync_path(finished)
    if os.path.lexists(target):
        target.rename(replaced)
    finished.rename(target)
    fsync_path(target.parent)


@contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Create `path` and lock it for this process.

    The holder may remove the directory before releasing the lock. BuildRunningError if another process holds it.
    """
    held = None
    while held is None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            held = lock(path, seconds=LOCK_SECONDS)
        except FileNotFoundError:
            pass  # the last holder has just removed it
        except BlockingIOError:
            raise BuildRunningError(
                f"another build is running in {path}: wait for it, or choose another folder", "out"
            ) from None
    with held:
        yield


def denied_bits(sources: Iterable[Path]) -> int:
    """Return the group and other permissions that any source denies, as mode bits.

    A file whose group differs from this process's also denies the group, unless others may read it. A missing file,
    such as a deleted log segment, denies everything.
    """
    bits = 0
    for path in sources:
        try:
            found = path.stat()
        except FileNotFoundError:
            return stat.S_IRWXG | stat.S_IRWXO
        for readable, whole in _READABLE:
            if not found.st_mode & readable:
                bits |= whole
        if bits & stat.S_IRWXO and found.st_gid != os.getegid():
            bits |= stat.S_IRWXG
    return bits


def deny(directory: Path, bits: int) -> None:
    """Remove permissions from a directory and everything in it."""
    for path in [directory, *directory.rglob("*")]:
        mode = path.stat().st_mode
        if mode & bits:
            path.chmod(stat.S_IMODE(mode) & ~bits)
