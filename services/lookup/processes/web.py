"""The HTTP process: runs `services.lookup.web.app` and holds the tokenizers of the served stores."""

import asyncio
import os
import signal
import socket
from functools import partial

import uvloop
from starlette.types import ASGIApp

from services.common import logs
from services.common.addresses import ListenAddress
from services.common.guards import own_names
from services.common.http_server import HttpServer
from services.lookup.figures.metrics import metrics_text
from services.lookup.figures.totals import WorkerState
from services.lookup.processes.forking import SupervisorLink
from services.lookup.processes.inheritance import Inheritance
from services.lookup.processes.worker import BEAT, ORPHAN_SECONDS, make_follower, reload
from services.lookup.web.app import LookupSite, make_app
from services.lookup.web.drafting import DraftDesk
from services.lookup.web.lexicon import Lexicon
from services.lookup.web.live import Live
from services.lookup.web.readings import read_figures, read_readiness
from services.lookup.web.upstream import Upstream

NICE = 5
"""Niceness of this process: drafts have priority over pages and loading tokenizers."""
GRACE = 1.0
"""Seconds that requests have to complete when the service stops."""
LOCAL = ListenAddress("localhost", 0)
"""What clients of a Unix socket call it."""
FIRST_LOOK = 60.0
"""Maximum seconds to wait for tokenizers before answering requests without them."""


def main(inherited: Inheritance, link: SupervisorLink) -> int:
    """Run the HTTP process until it is told to end; return the exit status."""
    logs.configure(inherited.settings.log_format, inherited.settings.log_level, "web")
    os.nice(NICE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(inherited, link))
    return 0


async def _serve(inherited: Inheritance, link: SupervisorLink) -> None:
    loop = asyncio.get_running_loop()
    sockets = inherited.keep_for_web()
    lexicon = Lexicon()
    site = make_site(inherited, lexicon)
    settings = inherited.settings
    hosts = own_names(settings.http or LOCAL, settings.allow_hosts, tokens=settings.tokens is not None)
    server = Server(make_app(site, hosts), link, inherited)
    loop.add_signal_handler(signal.SIGTERM, server.stop)

    def follow_permissions() -> None:
        site.gate = inherited.permissions

    loop.add_signal_handler(signal.SIGHUP, reload, inherited, follow_permissions)
    link.watch(lambda: loop.call_soon_threadsafe(server.stop), GRACE + ORPHAN_SECONDS)
    follower = make_follower(inherited.settings, lexicon.follow, recall=True)
    follower.start()
    await asyncio.to_thread(follower.wait_for_first, FIRST_LOOK)
    await server.serve(sockets)
    follower.stop(timeout=0.5)


def make_site(inherited: Inheritance, lexicon: Lexicon) -> LookupSite:
    """Return the parts of the HTTP application."""
    figures = inherited.figures
    upstream = Upstream(
        str(inherited.unix.path), inherited.token if inherited.permissions.needs_token else ""
    )
    most = inherited.settings.all_limits.shared_budget
    return LookupSite(
        upstream,
        DraftDesk(upstream, lexicon, max_budget=most),
        inherited.permissions,
        Live(partial(read_figures, figures)),
        partial(metrics_text, figures),
        lambda: read_readiness(figures, {*lexicon.names, *inherited.settings.names}),
        most,
    )


class Server(HttpServer):
    """The HTTP server of this process."""

    def __init__(self, app: ASGIApp, link: SupervisorLink, inherited: Inheritance) -> None:
        """Serve an application, report to the supervisor when ready, and show signs of life from then on."""
        super().__init__(app, GRACE)
        self._link = link
        self._slot = inherited.web_figures.slot(0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving."""
        await super().startup(sockets)
        self._slot.begin()
        self._slot.state = WorkerState.READY
        self._beat()
        self._link.report(ready=True)

    def _beat(self) -> None:
        self._slot.heartbeat()
        asyncio.get_running_loop().call_later(BEAT, self._beat)
