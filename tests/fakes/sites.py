"""The HTTP side of the lookup service for tests, on a real frame service that runs in a thread."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from starlette.applications import Starlette

from services.common.http_server import HttpServer
from services.common.permissions import EVERY, Grant, Permissions, hash_token
from services.lookup.figures.counting import SharedCounters, Slot
from services.lookup.figures.metrics import metrics_text
from services.lookup.figures.totals import Labels, WorkerState
from services.lookup.frames.answering import Answerer
from services.lookup.frames.server import FrameServer
from services.lookup.limits import SHARED_BUDGET, Limits
from services.lookup.stores.served import OpenStores, open_served
from services.lookup.stores.targets import Target, with_digest
from services.lookup.web.app import LookupSite, make_app
from services.lookup.web.drafting import DraftDesk
from services.lookup.web.lexicon import Lexicon
from services.lookup.web.live import Live
from services.lookup.web.readings import read_figures, read_readiness
from services.lookup.web.upstream import Upstream
from tests.fakes.waiting import SECONDS

_OWN = "token of the HTTP side"
Result = TypeVar("Result")


class Loop:
    """An event loop in a thread, of the kind that the service has."""

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


class Workers:
    """One worker as the service has it, but in a thread: stores, counters, frames over a Unix socket."""

    def __init__(
        self, stores: Mapping[str, Path], permissions: Permissions, limits: Limits | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="draftstore-web-")
        self.path = str(Path(self._folder.name) / "lookup.sock")
        self.figures = SharedCounters(1)
        self.slot: Slot = self.figures.slot(0)
        self.slot.begin()
        self.open_stores = OpenStores()
        self.permissions = permissions
        self.limits = limits or Limits()
        self._served: dict[str, Labels] = {}
        self._loop = Loop()
        for name, path in stores.items():
            self.put(name, path)
        self.slot.state = WorkerState.READY
        self.start()

    def put(self, name: str, path: Path) -> None:
        """Serve a store under a name."""
        served = open_served(
            Target(name, path)
        )  # kernels that are still to be compiled would keep the first request waiting
        self._loop.loop.call_soon_threadsafe(self.open_stores.put, name, served)
        self._served[name] = Labels(served.kind, f"{served.build:016x}", f"{served.tokenizer:016x}")
        self.slot.announce(self._served.items())

    def start(self) -> None:
        """Begin to take connections."""

        async def start() -> FrameServer:
            server = FrameServer(Answerer(self.open_stores, self.permissions, self.limits, self.slot))
            listening = socket.socket(socket.AF_UNIX)
            Path(self.path).unlink(missing_ok=True)
            listening.bind(self.path)
            listening.listen()
            server.share([listening], self.figures, 0)
            self._beat()
            return server

        self._server = self._loop.run(start())

    def _beat(self) -> None:
        """Show that the loop goes round, as a worker does."""
        self.slot.heartbeat()
        self._beating = self._loop.loop.call_later(0.5, self._beat)

    def stop(self) -> None:
        """Break all connections off, and take no more."""

        async def stop() -> None:
            self._beating.cancel()
            self._server.close()

        self._loop.run(stop())

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._loop.close()
        self.open_stores.close()
        self._folder.cleanup()


@dataclass
class Running:
    """What a test has of the service."""

    workers: Workers
    lexicon: Lexicon
    grants: tuple[Grant, ...]

    def site(self, most_at_once: int = 32, max_budget: int = SHARED_BUDGET) -> LookupSite:
        """Return a new HTTP side; each belongs to one event loop."""
        upstream = Upstream(self.workers.path, _OWN if self.grants else "", deadline=SECONDS)
        return LookupSite(
            upstream=upstream,
            desk=DraftDesk(upstream, self.lexicon, most_at_once, max_budget),
            gate=Permissions(self.grants or None),
            live=Live(lambda: read_figures(self.workers.figures)),
            metrics=lambda: metrics_text(self.workers.figures),
            ready=lambda: read_readiness(self.workers.figures, self.lexicon.names),
            max_budget=max_budget,
        )

    def app(self, max_budget: int = SHARED_BUDGET) -> Starlette:
        """Return a new application."""
        return make_app(self.site(max_budget=max_budget), hosts=("testserver",))


def grant(name: str, token: str, *releases: str) -> Grant:
    """Return the grant of a token."""
    return Grant(name, frozenset(releases), hash_token(token))


@contextmanager
def running_site(stores: Mapping[str, Path], *grants: Grant) -> Iterator[Running]:
    """Run the service; with grants it asks for tokens."""
    permissions = Permissions(grants or None).including(grant("http", _OWN, EVERY))
    workers = Workers(stores, permissions)
    lexicon = Lexicon()
    lexicon.follow(with_digest(Target(name, path)) for name, path in stores.items())
    try:
        yield Running(workers, lexicon, grants)
    finally:
        workers.close()


@contextmanager
def serving(app: Starlette, drain_seconds: float = 1.0) -> Iterator[str]:
    """Serve an application as the web process does, in a thread; yields its address."""
    loop = Loop()
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, drain_seconds)
    done = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listening]), loop.loop)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop.loop.call_soon_threadsafe(server.stop)
        done.result(SECONDS)
        loop.close()
