"""The HTTP side of the lookup service for tests, on real stores; and servers in a thread."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp

from services.common.http import HttpServer
from services.common.permissions import Grant, Permissions, hash_token
from services.lookup.app import Site, make_app
from services.lookup.drafting import DraftService
from services.lookup.following import Releases
from services.lookup.metrics import Metrics
from services.lookup.settings import LookupSettings, Target
from tests.fakes.waiting import SECONDS

Result = TypeVar("Result")


class Loop:
    """An event loop in a thread, of the kind that the services have."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(SECONDS)

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


class Running:
    """Open stores and their site; the stores change only by `put`."""

    def __init__(self, settings: LookupSettings, permissions: Permissions, **options: Any) -> None:
        self.metrics = Metrics()
        self.releases = Releases(settings, self.metrics, **options)
        self.releases.follow()
        self.drafting = DraftService(self.releases, self.metrics, settings.all_limits)
        self.site = Site(self.releases, self.drafting, permissions)

    def put(self, **stores: Path) -> None:
        """Serve these stores instead."""
        targets = tuple(Target(name, path) for name, path in stores.items())
        self.releases.settings = self.releases.settings.changed(stores=targets)
        self.releases.follow()

    def app(self) -> Starlette:
        """Return a new application."""
        return make_app(self.site, hosts=("testserver",))

    def close(self) -> None:
        """Close the stores."""
        self.drafting.close()
        self.releases.close()


def grant(name: str, token: str, *releases: str, max_budget: int | None = None) -> Grant:
    """Return the grant of a token."""
    return Grant(name, frozenset(releases), hash_token(token), max_budget)


@contextmanager
def running_site(
    stores: Mapping[str, Path], *grants: Grant, max_budget: int | None = None
) -> Iterator[Running]:
    """Open stores; with grants their site asks for tokens."""
    targets = tuple(Target(name, path) for name, path in stores.items())
    with tempfile.TemporaryDirectory() as folder:
        settings = LookupSettings(socket=Path(folder) / "s", stores=targets, max_budget=max_budget)
        running = Running(settings, Permissions(grants or None), kept_seconds=-1)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def serving(app: ASGIApp, drain_seconds: float = 1.0, port: int = 0) -> Iterator[str]:
    """Serve an application in a thread; yields its address."""
    loop = Loop()
    listening = socket.create_server(("127.0.0.1", port), backlog=1024)
    server = HttpServer(app, drain_seconds)
    done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listening]), loop.loop)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        done.result(SECONDS)
        loop.close()


def browse(address: str) -> httpx.Client:
    """Return an HTTP client of an address."""
    return httpx.Client(base_url=address, trust_env=False, timeout=SECONDS)


def connect(address: str, data: bytes = b"") -> socket.socket:
    """Return a connection over which some bytes were sent."""
    connected = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), SECONDS)
    connected.sendall(data)
    return connected


def hold(address: str, path: str, body: bytes = b"{}") -> socket.socket:
    """Begin a request; return its connection when the service waits for the body."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    begun = connect(address, f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
    assert begun.recv(65_536).startswith(b"HTTP/1.1 100 ")
    return begun
