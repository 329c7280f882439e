"""Opening the TCP sockets that a service listens on."""

import errno
import socket
import time

from draftstore.errors import LookupServiceError
from services.common.addresses import ListenAddress

BACKLOG = 1024
RELEASE_SECONDS = 2.0
"""Seconds that the processes of a killed service have to release their sockets."""
PAUSE = 0.02
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def open_tcp(endpoint: ListenAddress, option: str) -> list[socket.socket]:
    """Return listening sockets, one for each address of the host.

    Args:
        endpoint: address; port 0 picks a free one.
        option: the option that names it, for messages.

    Raises:
        LookupServiceError: the host is unknown or not on this machine, or the port is taken or not permitted.
    """
    sockets: list[socket.socket] = []
    port = endpoint.port
    for address in endpoint.addresses():
        try:
            sockets.append(_bind_patiently(address, port))
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


def _bind_patiently(address: str, port: int) -> socket.socket:
    """Return a listening socket; retry while processes of a killed service still hold the port."""
    deadline = time.monotonic() + RELEASE_SECONDS
    while True:
        try:
            return _bind_tcp(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(PAUSE)


def _bind_tcp(address: str, port: int) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # the port is free again right after a stop
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
    """Return what the user can do about a socket that cannot be opened."""
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} of {endpoint.host} is in use: stop the program there, or choose another {option}"
    if error.errno == errno.EACCES:
        return f"this user may not listen at port {endpoint.port}: choose a port from 1024 on for {option}"
    return f"cannot listen at {endpoint} ({error.strerror}): {option} needs an address of this machine"
