"""Locks on files and folders; they end with their process, and work across users and containers that share storage.

A reader holds a shared lock on a store's directory while the store is open: its lease. Removing a store needs the
exclusive lock.
"""

import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from draftstore.errors import StoreError

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems without locks; no lock is held there."""
POLL_SECONDS = 0.01


class Lock(AbstractContextManager["Lock"]):
    """A lock that is held until `close` or the end of the process and its forked children."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __exit__(self, *_error: object) -> None:
        self.close()


def lock(path: Path, *, shared: bool = False, seconds: float = math.inf) -> Lock:
    """Lock an existing file or folder; if it was replaced meanwhile, lock its replacement.

    Others may hold shared locks at the same time. BlockingIOError if another lock is still held after some seconds.
    """
    end = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            hold(descriptor, shared=shared, seconds=end - time.monotonic())
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return Lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def hold(descriptor: int, *, shared: bool = False, seconds: float = math.inf) -> None:
    """Lock an open file, as `lock` does, until it is closed."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, kind if seconds == math.inf else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(POLL_SECONDS)
            continue
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
        return


def holders(path: Path) -> str:
    """Name the processes that hold locks on a file, as far as Linux tells: `process 17 ('draftstore db start')`."""
    found = []
    with suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, place, _, _ = line.split()
            if kind == "FLOCK" and place.split(":")[-1] == inode:  # not those that wait: their kind is `->`
                command = Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0").replace(b"\0", b" ")
                found.append(f"process {pid} ({command.decode(errors='replace')!r})")
    return ", ".join(found) or "another process"


def lease(store: Path) -> Lock:
    """Lock a store's directory for a reader, unless it is missing; StoreError if it is being removed."""
    try:
        return lock(store, shared=True, seconds=0)
    except FileNotFoundError:
        return Lock(None)
    except BlockingIOError:
        raise StoreError(f"{store} is being removed: publish another build, or build it again") from None


@contextmanager
def exclusive(directory: Path) -> Iterator[bool]:
    """Hold the exclusive lock on a directory during the block; yield False if a reader or build holds a lock."""
    try:
        held = lock(directory, seconds=0)
    except (FileNotFoundError, NotADirectoryError):
        yield True
    except BlockingIOError:
        yield False
    else:
        with held:
            yield True
