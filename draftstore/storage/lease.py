"""Leases of stores: a reader holds a shared lock on a store's directory while the store is open.

Removing a store needs the exclusive lock. Locks end with their process, and hold across users and containers that share
the file system.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftstore.errors import StoreError

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems without locks: stores there open without a lease."""


class StoreLease:
    """A shared lock on a store's directory, held until `close`."""

    def __init__(self, store: Path) -> None:
        """Lock a store; a missing one is not locked, and one that is being removed raises StoreError."""
        self._descriptor: int | None = None
        with suppress(FileNotFoundError, NotADirectoryError):
            self._descriptor = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _lock(self._descriptor, fcntl.LOCK_SH)
            except BlockingIOError:
                self.close()
                raise StoreError(
                    f"{store} is being removed: publish another build, or build it again"
                ) from None

    def close(self) -> None:
        """Release the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def exclusive(directory: Path) -> Iterator[bool]:
    """Hold the exclusive lock on a directory during the block; yield False if a reader or a build holds it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield True
        return
    try:
        try:
            _lock(descriptor, fcntl.LOCK_EX)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    """Lock an open directory, where its file system has locks; BlockingIOError if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
