"""Encrypted connections to the lookup service: the client's side of `draftstore serve --tls-cert`."""

import select
import socket
import ssl
from pathlib import Path

from draftstore.errors import DraftstoreError
from draftstore.remote.addresses import Address

Tls = bool | str | Path | ssl.SSLContext
"""Whether to encrypt; or the file of the certificates to trust, or a context that knows them."""


def client_context(tls: Tls | None, address: Address) -> ssl.SSLContext | None:
    """Return the context for connections to an address; None for plain ones."""
    tls = address.tls if tls is None else tls
    if tls is False:
        return None
    if address.path:
        raise DraftstoreError(f"{address} is a Unix socket, which nobody overhears: leave tls= out")
    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        return ssl.create_default_context(cafile=None if tls is True else str(tls))
    except OSError as error:
        raise DraftstoreError(
            f"the certificates in {tls} cannot be used: {error.strerror or error}"
        ) from None


class TlsSocket:
    """An encrypted non-blocking socket with the methods of a plain one."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Take over a connected socket; `shake_hands` must follow."""
        self._socket = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
        self.stuck = False
        """Whether part of a message may have been sent: another message must not follow."""

    def shake_hands(self) -> int:
        """Go on with the handshake; return the event of `poll` that it waits for, 0 at its end."""
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        return 0

    def send(self, data: bytes | memoryview, _flags: int = 0) -> int:
        """Send some bytes without waiting; return their number.

        Raises:
            BlockingIOError: none could be sent; the same bytes must follow.
        """
        try:
            sent = self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self.stuck = True
            raise BlockingIOError from None
        self.stuck = False
        return sent

    def recv(self, size: int) -> bytes:
        """Return received bytes, empty at the end.

        Raises:
            BlockingIOError: there are none yet, although the socket may be readable.
        """
        try:
            return self._socket.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def pending(self) -> int:
        """Return the number of received bytes that make no socket readable any more."""
        return self._socket.pending()

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it."""
        self._socket.close()
