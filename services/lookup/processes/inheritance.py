"""Resources that the processes of the service inherit from the supervisor, opened once before the fork."""

import secrets
import socket
import ssl
from dataclasses import dataclass, field

from draftstore.trees.frontier import MAX_BUDGET
from services.common.permissions import EVERY, Grant, Permissions, hash_token
from services.common.sockets import open_tcp, port_of
from services.lookup.figures.counting import SharedCounters
from services.lookup.processes.certificates import server_context
from services.lookup.processes.sockets import UnixListener
from services.lookup.settings import LookupSettings

WEB = "web"


@dataclass
class Inheritance:
    """Resources shared by the processes.

    Attributes:
        settings: settings of this run.
        figures: counters of the workers, in shared memory.
        web_figures: the same of the HTTP process, which counts nothing but shows signs of life.
        unix: Unix socket of the binary protocol.
        tcp: TCP sockets of the binary protocol.
        http: sockets of the HTTP process.
        http_unix: the one among them that is a Unix socket, if any.
        token: token that the HTTP process presents to the workers; never leaves the memory of these processes.
        permissions: permissions of clients.
        tls: certificate for TCP sockets of the binary protocol; None: they are not encrypted.
    """

    settings: LookupSettings
    figures: SharedCounters
    unix: UnixListener
    tcp: list[socket.socket]
    http: list[socket.socket]
    http_unix: UnixListener | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    permissions: Permissions = field(default_factory=Permissions.open_to_all)
    tls: ssl.SSLContext | None = None
    web_figures: SharedCounters = field(default_factory=lambda: SharedCounters(1))

    @classmethod
    def open(cls, settings: LookupSettings) -> "Inheritance":
        """Open all shared resources.

        Raises:
            DraftstoreError: a socket cannot be opened, or the token file or the certificate cannot be used.
        """
        unix = UnixListener(settings.socket, settings.socket_mode)
        made = cls(settings, SharedCounters(settings.workers), unix, [], [])
        try:
            made.reload()
            if settings.listen:
                made.tcp = open_tcp(settings.listen, "--listen")
            if settings.http:
                made.http = open_tcp(settings.http, "--http")
            if settings.http_socket:
                made.http_unix = UnixListener(settings.http_socket, settings.socket_mode, "--http")
                made.http = [made.http_unix.socket]
        except BaseException:
            made.close()
            raise
        return made

    def reload(self) -> None:
        """Reread the token file and the certificate, where in use; on failure the old ones stay.

        Raises:
            PermissionsError: the token file cannot be used.
            LookupServiceError: the certificate cannot be used.
        """
        settings = self.settings
        if settings.tls_cert:
            self.tls = server_context(settings.tls_cert, settings.tls_key)
        if settings.tokens:
            grant = Grant(WEB, frozenset([EVERY]), hash_token(self.token), MAX_BUDGET)
            self.permissions = Permissions.load(settings.tokens).including(grant)

    @property
    def tcp_port(self) -> int | None:
        """TCP port of the binary protocol."""
        return port_of(self.tcp) if self.tcp else None

    @property
    def http_port(self) -> int | None:
        """TCP port of the HTTP process."""
        return port_of(self.http) if self.settings.http else None

    def keep_for_worker(self) -> list[socket.socket]:
        """Return the sockets that a worker listens on; close the others."""
        self._disown()
        for listening in self.http:
            listening.close()
        return [self.unix.socket, *self.tcp]

    def keep_for_web(self) -> list[socket.socket]:
        """Return the sockets that the HTTP process listens on; close the others."""
        self._disown()
        for listening in (self.unix.socket, *self.tcp):
            listening.close()
        return self.http

    def _disown(self) -> None:
        """Leave the files of the Unix sockets to the supervisor."""
        for unix in filter(None, (self.unix, self.http_unix)):
            unix.disown()

    def close(self) -> None:
        """Stop listening."""
        for listening in (*self.tcp, *self.http):
            listening.close()
        for unix in filter(None, (self.unix, self.http_unix)):
            unix.close()
