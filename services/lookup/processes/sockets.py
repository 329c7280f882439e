"""The Unix sockets of the service, opened once in the supervisor and inherited by the other processes."""

import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from draftstore.errors import LookupServiceError
from draftstore.remote.addresses import MAX_SOCKET_PATH, check_owner
from services.common.sockets import BACKLOG, PAUSE, RELEASE_SECONDS


class UnixListener:
    """A Unix socket with a lock: while it is open, no second service can take its path."""

    def __init__(self, path: Path, mode: int = 0o600, option: str = "--socket") -> None:
        """Open the socket, replacing a file left behind by a dead service.

        Args:
            path: path of the socket; a missing folder is created for this user alone.
            mode: permissions of the socket.
            option: the option that names it, for messages.

        Raises:
            LookupServiceError: another service or a file other than a socket is there, or others own the folder.
        """
        self.path = path.absolute()
        self._option = option
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            raise LookupServiceError(
                f"{self.path} is too long for a Unix socket, at most {MAX_SOCKET_PATH} bytes: choose a shorter {option}"
            )
        self._make_folder()
        self._lock = self._take_lock()
        try:
            self._remove_stale()
            self.socket = self._bind(mode)
        except BaseException:
            os.close(self._lock)
            raise
        self._identity = _identity(self.path)

    def _make_folder(self) -> None:
        """Create the folder; refuse one that other users could replace."""
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(str(self.path))
            owner = folder.stat().st_uid
        except OSError as error:
            raise LookupServiceError(
                f"the folder of the socket {self.path} cannot be used ({error.strerror or error}): choose another "
                f"{self._option}"
            ) from None
        if owner not in (0, os.geteuid()) and os.geteuid() != 0:
            raise LookupServiceError(
                f"{folder} belongs to another user, who could listen in our place: choose another {self._option}"
            )

    def _take_lock(self) -> int:
        """Return the descriptor of the lock file beside the socket, held while this process lives."""
        path = self._lock_path
        while True:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise LookupServiceError(
                    f"{path} cannot be written ({error.strerror}): choose another {self._option}"
                ) from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise self._taken() from None
            if _identity(path) == _identity(lock):
                return lock
            os.close(lock)  # its holder has just removed it

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _taken(self) -> LookupServiceError:
        return LookupServiceError(
            f"another lookup service listens at {self.path}: stop it, or choose another {self._option}"
        )

    def _remove_stale(self) -> None:
        """Remove the socket of a dead service, after giving its last processes a moment to end."""
        deadline = time.monotonic() + RELEASE_SECONDS
        while True:
            try:
                found = self.path.lstat()
            except FileNotFoundError:
                return
            if not stat.S_ISSOCK(found.st_mode):
                raise LookupServiceError(
                    f"{self.path} exists and is not a socket: choose another {self._option}"
                )
            if not _answers(self.path):
                self.path.unlink(missing_ok=True)
                return
            if time.monotonic() > deadline:
                raise self._taken()
            time.sleep(PAUSE)

    def _bind(self, mode: int) -> socket.socket:
        """Return the listening socket, never connectable by more users than `mode` allows."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), mode & 0o600)
            made.bind(str(self.path))
            self.path.chmod(mode)
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            raise LookupServiceError(
                f"no socket can be made at {self.path} ({error.strerror}): choose another {self._option}"
            ) from None
        made.setblocking(False)
        return made

    def close(self) -> None:
        """Stop listening, remove the file and free the path for other services."""
        self.socket.close()
        if _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def disown(self) -> None:
        """Drop the lock in a forked process; the supervisor keeps it."""
        os.close(self._lock)


def _answers(path: Path) -> bool:
    """Return True if somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # queue full, or no permission: somebody is there
    return True


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Return the identity of a file, to detect that it was replaced; None if there is none."""
    with suppress(OSError):
        found = file.lstat() if isinstance(file, Path) else os.fstat(file)
        return found.st_dev, found.st_ino
    return None
