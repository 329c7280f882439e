"""`draftstore serve`: one event loop that answers frames and HTTP.

systemd or compose restarts it; several processes over the same files use more cores. A stuck loop ends the process.
"""

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from draftstore.errors import DraftstoreError, LookupServiceError
from services.common.addresses import ListenAddress
from services.common.http import HttpServer, own_names
from services.common.permissions import Permissions
from services.common.sockets import BACKLOG, UnixListener, open_tcp, port_of
from services.lookup.app import Site, make_app
from services.lookup.drafting import DraftService
from services.lookup.following import Releases
from services.lookup.metrics import Metrics
from services.lookup.protocol import Clients
from services.lookup.served import load_kernels
from services.lookup.settings import LookupSettings

LOG = logging.getLogger(__name__)
STUCK_SECONDS = 30.0
"""Seconds that the event loop may be stuck before the process ends."""
SWITCH = 1e-4
"""Maximum seconds that a thread may delay the event loop (GIL switch interval)."""
LAST_ANSWERS = 1.0
"""Seconds that requests have to complete at shutdown."""
LOCAL = ListenAddress("localhost", 0)
"""Host name used by HTTP clients of a Unix socket."""
Started = Callable[[dict[str, Any]], None]


def run(settings: LookupSettings, started: Started = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT; DraftstoreError if the service cannot start.

    `started` is called with a description of stores and addresses once all are ready.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.setswitchinterval(SWITCH)
    server = Server(settings, started)
    try:
        load_kernels()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve())
    finally:
        server.close()


class Server:
    """One run of the service, from the opening of its sockets on."""

    def __init__(self, settings: LookupSettings, started: Started = lambda _: None) -> None:
        self.settings = settings
        self._started = started
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if settings.tls_cert else None
        self._permissions = self._read_files()
        self.unix = UnixListener(settings.socket, settings.mode)
        self._http_unix: UnixListener | None = None
        try:
            self.tcp = open_tcp(settings.listen, "--listen", shared=True) if settings.listen else []
            self._http = open_tcp(settings.http_address, "--http") if settings.http_address else []
            if isinstance(settings.http, Path):
                self._http_unix = UnixListener(settings.http, settings.mode, "--http")
                self._http = [self._http_unix.socket]
        except BaseException:
            self.unix.close()
            raise
        self.metrics = Metrics()
        self.releases = Releases(settings, self.metrics)

    async def serve(self) -> None:
        """Open the releases, answer until the signal, let open requests complete."""
        self._loop = loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        opened = asyncio.Event()
        self.releases.start(lambda: loop.call_soon_threadsafe(opened.set))
        waits = [asyncio.create_task(event.wait()) for event in (opened, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            return
        if problem := self.releases.problem_at_start():
            raise LookupServiceError(problem)
        drafting = DraftService(self.releases, self.metrics, self.settings.all_limits)
        self.clients = Clients(drafting, self._permissions)
        self._site = Site(self.releases, drafting, self._permissions)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        gc.collect()
        gc.freeze()  # the collector skips long-lived objects
        await self._listen()
        drafting.close()

    async def _listen(self) -> None:
        loop, settings, connect = self._loop, self.settings, self.clients.connect
        tls: dict[str, Any] = {}
        if self._tls:
            seconds = settings.limits.patience
            tls = {"ssl": self._tls, "ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": LAST_ANSWERS}
        servers = [
            await loop.create_unix_server(connect, sock=self.unix.socket, backlog=BACKLOG),
            *[await loop.create_server(connect, sock=at, backlog=BACKLOG, **tls) for at in self.tcp],
        ]
        hosts = own_names(
            settings.http_address or LOCAL, settings.allow_hosts, tokens=self._permissions.needs_token
        )
        http = HttpServer(make_app(self._site, hosts), LAST_ANSWERS)
        for at in self._http:
            at.listen(BACKLOG)  # what is announced below answers
        web = asyncio.create_task(http.serve(self._http)) if self._http else None
        self._tick()
        self._tidy()
        self._started(self._describe())
        LOG.info("ready", extra={"pid": os.getpid(), "releases": self.releases.names})
        await self._stop.wait()
        self._site.stopping = True
        if web:
            LOG.info("about to stop", extra={"seconds": settings.notice_seconds})
            await asyncio.sleep(settings.notice_seconds)
        for server in servers:
            server.close()
        if web:
            http.should_exit = True
            await web
        await self.clients.close(LAST_ANSWERS)
        faulthandler.cancel_dump_traceback_later()
        LOG.info("stopped")

    def _tick(self) -> None:
        """Do what is due every second; if the loop is stuck, the timer ends the process."""
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
        self._site.live_figures.sample()
        self._loop.call_later(1.0, self._tick)

    def _tidy(self) -> None:
        """Close connections that are past their deadline; every 0.1 s."""
        self.clients.close_overdue(self._loop.time())
        self._loop.call_later(0.1, self._tidy)

    def _reload(self) -> None:
        """Reload the tokens and the certificate; on failure, the earlier ones stay."""
        try:
            permissions = self._read_files()
        except DraftstoreError as error:
            LOG.warning("a file cannot be used; the earlier one stays valid", extra={"error": str(error)})
            return
        self._site.permissions = permissions
        self.clients.change_permissions(permissions)
        LOG.info("tokens and certificate reloaded")

    def _read_files(self) -> Permissions:
        """Return the permissions, and load the certificate for new connections."""
        settings = self.settings
        if self._tls and settings.tls_cert:
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._tls):  # the first is a trial
                _load_certificate(context, settings.tls_cert, settings.tls_key)
        return Permissions.load(settings.tokens)

    def _describe(self) -> dict[str, Any]:
        settings = self.settings
        http = settings.http_address and settings.http_address._replace(port=port_of(self._http)).reached_as
        return {
            "pid": os.getpid(),
            "socket": str(self.unix.path),
            "listen": str(settings.listen._replace(port=port_of(self.tcp))) if settings.listen else None,
            "tls": self._tls is not None,
            "url": f"http://{http}/" if http else None,
            "http_socket": str(self._http_unix.path) if self._http_unix else None,
            "needs_token": self._permissions.needs_token,
            "releases": self.releases.describe(),
        }

    def close(self) -> None:
        """Stop listening, remove the Unix sockets, close the stores."""
        for listening in (*self.tcp, *self._http):
            listening.close()
        for unix in filter(None, (self.unix, self._http_unix)):
            unix.close()
        self.releases.close()


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asks for a passphrase
    except OSError as error:
        files = f"--tls-cert {certificate}" + (f" with --tls-key {key}" if key else "")
        raise LookupServiceError(
            f"{files} cannot be used ({error.strerror or error}): expected a certificate and its private key, in PEM "
            "and without a passphrase"
        ) from None
