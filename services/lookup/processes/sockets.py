"""Opening the sockets that the service listens at: once, in the supervisor; the other processes inherit them."""

import errno
import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from draftstore.errors import LookupServiceError
from draftstore.remote.addresses import MAX_SOCKET_PATH, check_owner
from services.lookup.settings import ListenAddress

BACKLOG = 1024
PATIENCE = 2.0
"""Seconds that the processes of a service that was killed have to let go of their sockets."""
_PAUSE = 0.02
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class UnixListener:
    """A Unix socket of our own: while it is open, no second service takes its path."""

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """Open it; a file that a dead service left behind gives way.

        Args:
            path: of the socket; its folder is made, for this user alone, where it is missing.
            mode: permissions of the socket.

        Raises:
            LookupServiceError: another service is there, or something that is no socket, or the folder is not ours.
        """
        self.path = path.absolute()
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            raise LookupServiceError(
                f"{self.path} is too long for a Unix socket, at most {MAX_SOCKET_PATH} bytes: choose a shorter --socket"
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
        """Make the folder; refuse one that other users could exchange for their own.

        Raises:
            LookupServiceError: it cannot be made, or belongs to somebody else.
        """
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_owner(str(self.path))
            owner = folder.stat().st_uid
        except OSError as error:
            raise LookupServiceError(
                f"the folder of the socket {self.path} cannot be used ({error.strerror or error}): choose another "
                "--socket"
            ) from None
        if owner not in (0, os.geteuid()) and os.geteuid() != 0:
            raise LookupServiceError(
                f"{folder} belongs to another user, who could listen in our place: choose another --socket"
            )

    def _take_lock(self) -> int:
        """Return the descriptor of the lock beside the socket, held while this process lives.

        Raises:
            LookupServiceError: another service holds it.
        """
        path = self._lock_path
        while True:
            try:
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise LookupServiceError(
                    f"{path} cannot be written ({error.strerror}): choose another --socket"
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
            f"another lookup service listens at {self.path}: stop it, or choose another --socket"
        )

    def _remove_stale(self) -> None:
        """Remove the file of a service that is gone; its last processes get a moment to end.

        Raises:
            LookupServiceError: somebody answers there, or the file is no socket.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                found = self.path.lstat()
            except FileNotFoundError:
                return
            if not stat.S_ISSOCK(found.st_mode):
                raise LookupServiceError(f"{self.path} exists and is no socket: choose another --socket")
            if not _answers(self.path):
                self.path.unlink(missing_ok=True)
                return
            if time.monotonic() > deadline:
                raise self._taken()
            time.sleep(_PAUSE)

    def _bind(self, mode: int) -> socket.socket:
        """Return the listening socket; at no moment may others than meant connect.

        Raises:
            LookupServiceError: the system refuses.
        """
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), mode & 0o600)
            made.bind(str(self.path))
            self.path.chmod(mode)
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            raise LookupServiceError(
                f"no socket can be made at {self.path} ({error.strerror}): choose another --socket"
            ) from None
        made.setblocking(False)
        return made

    def close(self) -> None:
        """Stop listening, remove the file, and let another service have the path."""
        self.socket.close()
        if _identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def disown(self) -> None:
        """Let go of the lock in a process that was forked: it ends with the supervisor."""
        os.close(self._lock)


def open_tcp(endpoint: ListenAddress, option: str) -> list[socket.socket]:
    """Return listening sockets, one for each address of the host.

    Args:
        endpoint: where; port 0 takes a free one.
        option: that the user named it with, for errors.

    Raises:
        LookupServiceError: the host is unknown or not of this machine, or the port is taken or not ours to take.
    """
    sockets: list[socket.socket] = []
    port = endpoint.port
    for address in endpoint.addresses():
        try:
            sockets.append(_bind_patiently(address, port))
        except OSError as error:
            if sockets and error.errno in _NOT_HERE:
                continue  # localhost is ::1 too, where the machine speaks IPv6
            for made in sockets:
                made.close()
            raise LookupServiceError(_explain(error, endpoint, option)) from None
        port = sockets[0].getsockname()[1]
    return sockets


def port_of(sockets: list[socket.socket]) -> int:
    """Return the port that TCP sockets listen at."""
    return int(sockets[0].getsockname()[1])


def _bind_patiently(address: str, port: int) -> socket.socket:
    """Return a listening socket; processes of a service that was killed get a moment to let go of the port."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return _bind_tcp(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _bind_tcp(address: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a port is free again at once after a stop
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _explain(error: OSError, endpoint: ListenAddress, option: str) -> str:
    """Return what to do about a socket that cannot be opened."""
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} of {endpoint.host} is in use: stop who listens there, or choose another {option}"
    if error.errno == errno.EACCES:
        return f"port {endpoint.port} is not for this user: choose one from 1024 on for {option}"
    return (
        f"nobody can listen at {endpoint} here ({error.strerror}): {option} takes an address of this machine"
    )


def _answers(path: Path) -> bool:
    """Tell whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # full, or not for us: somebody is there
    return True


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Return what tells a file apart from one that has taken its name; None if there is none."""
    with suppress(OSError):
        found = file.lstat() if isinstance(file, Path) else os.fstat(file)
        return found.st_dev, found.st_ino
    return None
