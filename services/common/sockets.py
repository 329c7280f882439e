"""Opening the listening sockets of a service."""

import errno
import os
import socket
from pathlib import Path

from draftstore.errors import LookupServiceError
from draftstore.remote.addresses import MAX_SOCKET_PATH, check_owner
from draftstore.storage.locks import Lock, lock
from services.common.addresses import ListenAddress

BACKLOG = 1024
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def open_tcp(endpoint: ListenAddress, option: str, *, shared: bool = False) -> list[socket.socket]:
    """Return listening sockets, one for each address of the host; LookupServiceError, naming the option, if that fails.

    If `shared`, other processes of this user may listen there too; the kernel spreads connections over them.
    """
    sockets: list[socket.socket] = []
    port = endpoint.port
    for address in endpoint.addresses():
        try:
            sockets.append(_bind_tcp(address, port, shared=shared))
        except OSError as error:
            if sockets and error.errno in _NOT_HERE:
                continue  # localhost is also ::1 where the machine has IPv6
            for made in sockets:
                made.close()
            raise LookupServiceError(_explain(error, endpoint, option)) from None
        port = sockets[0].getsockname()[1]
    return sockets


def port_of(sockets: list[socket.socket]) -> int:
    """Return the port that TCP sockets listen on."""
    return int(sockets[0].getsockname()[1])


def _bind_tcp(address: str, port: int, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port is free again right after a stop.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} of {endpoint.host} is in use: stop the program there, or choose another {option}"
    if error.errno == errno.EACCES:
        return f"this user may not listen at port {endpoint.port}: choose a port above 1023 for {option}"
    return f"cannot listen at {endpoint} ({error.strerror}): {option} needs an address of this machine"


class UnixListener:
    """A bound Unix socket with a lock: while it is open, no second service can take its path."""

    def __init__(self, path: Path, mode: int = 0o600, option: str = "--socket") -> None:
        """Bind the socket, replacing a file that a dead service left behind; create a missing folder, for this user.

        LookupServiceError, naming the option, if another service or a file is there, or others own the folder.
        """
        self.path = path.absolute()
        self._option = option
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH:
            raise self._refusal(
                f"{self.path} is longer than the {MAX_SOCKET_PATH} bytes of a Unix socket's path"
            )
        try:
            self._make_folder()
            self._lock = self._take_lock()
        except OSError as error:
            raise self._refusal(f"{self.path} cannot be used ({error.strerror or error})") from None
        try:
            self.socket = self._bind(mode)
        except OSError as error:
            self._lock.close()
            raise self._refusal(f"no socket can be made at {self.path} ({error.strerror or error})") from None

    def _refusal(self, problem: str) -> LookupServiceError:
        return LookupServiceError(f"{problem}: choose another {self._option}")

    def _make_folder(self) -> None:
        """Create the folder; refuse one that other users could replace."""
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(str(self.path))
        if folder.stat().st_uid not in (0, os.geteuid()) and os.geteuid() != 0:
            raise PermissionError(f"{folder} belongs to another user, who could listen there instead")

    def _take_lock(self) -> Lock:
        """Lock the file beside the socket; the file stays, the lock ends with the process."""
        path = Path(f"{self.path}.lock")
        path.touch(0o600)
        try:
            return lock(path, seconds=0)
        except BlockingIOError:
            raise self._refusal(f"another lookup service listens at {self.path}") from None

    def _bind(self, mode: int) -> socket.socket:
        """Return the socket, never connectable by more users than `mode` allows."""
        if os.path.lexists(self.path):
            if not self.path.is_socket():
                raise FileExistsError("a file that is not a socket is there")
            if _answers(self.path):
                raise FileExistsError("a program listens there")
            self.path.unlink()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(made.fileno(), mode & 0o600)
            made.bind(str(self.path))
            self.path.chmod(mode)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        return made

    def close(self) -> None:
        """Stop listening, remove the file and free the path for other services."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        self._lock.close()


def _answers(path: Path) -> bool:
    """Return whether a program listens on a Unix socket, even one with a full queue or reserved for other users."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass
    return True
