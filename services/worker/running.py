"""The worker process: loads the model, serves, and shuts down in order."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvloop
from prometheus_client import disable_created_metrics

from draftstore.errors import DraftstoreError, LookupServiceError
from services.common.http import HttpServer, own_names
from services.common.permissions import Permissions
from services.common.sockets import open_tcp, port_of
from services.worker.answers import Engine
from services.worker.app import WorkerSite, make_app
from services.worker.decoder import Decoder
from services.worker.metrics import WorkerMetrics
from services.worker.response_log import ResponseLog
from services.worker.settings import WorkerSettings

LOG = logging.getLogger(__name__)
LIBRARIES = ("transformers", "huggingface_hub", "accelerate", "httpx", "torch", "filelock", "urllib3")
LAST_ANSWERS = 2.0
"""Seconds that clients have to read the last answers."""
CUT_SECONDS = 10.0
"""Seconds for the current forward pass to end after a cancellation."""
Load = Callable[[], Engine]
Started = Callable[[dict[str, Any]], None]


def run(settings: WorkerSettings, load: Load, started: Started = lambda _: None) -> None:
    """Serve a model until SIGTERM or SIGINT; raises what loading it in the decoding thread raises.

    `started` is called with the served model and addresses, once the model is loaded.
    """
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    settings.check_access(host=settings.endpoint)
    worker = _Worker(settings, load, started)
    try:
        sockets = open_tcp(settings.endpoint, "--host or --port")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(worker.serve(sockets))
    finally:
        if worker.log:
            worker.log.close()
    if worker.failure:
        raise worker.failure
    if worker.stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class _Worker:
    """The event loop's part of a run; `failure` ended it, `ended` says whether the decoding thread has."""

    def __init__(self, settings: WorkerSettings, load: Load, started: Started) -> None:
        self._settings, self._started = settings, started
        permissions = Permissions.load(settings.tokens)
        figures, file = WorkerMetrics(), settings.response_log
        self.log = ResponseLog(file, settings.response_log_bytes, figures.logged) if file else None
        keep = self.log.put if self.log else None
        self._decoder = Decoder(load, figures, queue=settings.queue, changed=self._notify, keep=keep)
        self._site = WorkerSite(self._decoder, figures, permissions, settings)
        self._changed = asyncio.Event()
        self._signals = 0
        self.failure: BaseException | None = None
        self.ended = False

    @property
    def stuck(self) -> bool:
        """Whether a thread loads a model, runs a forward pass or compiles a schema: it cannot be stopped."""
        engine = self._decoder.engine
        return not self.ended or (engine is not None and engine.grammars.busy)

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until a signal."""
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        port, settings = port_of(sockets), self._settings
        hosts = own_names(settings.endpoint, settings.allow_hosts, tokens=settings.tokens is not None)
        server = HttpServer(make_app(self._site, hosts), LAST_ANSWERS)
        serving = asyncio.create_task(server.serve(sockets))
        LOG.info("loading the model", extra={"port": port})
        self._decoder.start()
        following = asyncio.create_task(self._follow(port))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            self.failure = LookupServiceError("the HTTP server has ended: see the log")
        server.should_exit = True
        await serving
        self.ended = self._decoder.join(CUT_SECONDS if self._decoder.state == "ended" else 0)
        following.cancel()
        if not self.failure:
            LOG.info("stopped")

    async def _follow(self, port: int) -> None:
        """Report the start, wait for the signal to stop, and let the accepted requests complete."""
        decoder = self._decoder
        await self._until(lambda: decoder.state != "loading")
        if decoder.ready:
            self._announce(port)
        await self._until(lambda: decoder.state == "ended" or self._signals > 0)
        if self._signals and decoder.engine:
            grace = self._settings.grace_seconds
            await self._until(lambda: decoder.state == "ended" or self._signals > 1, grace)
            decoder.hurry()
            await self._until(lambda: decoder.state == "ended", CUT_SECONDS)
        self.failure = decoder.failure
        if not self._signals and not self.failure:
            self.failure = LookupServiceError("the decoding thread has ended: see the log")

    async def _until(self, test: Callable[[], bool], seconds: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not test():
                    await self._changed.wait()
                    self._changed.clear()

    def _announce(self, port: int) -> None:
        facts, endpoint = self._decoder.require_model().facts, self._settings.endpoint._replace(port=port)
        started: dict[str, Any] = {
            "model": facts.name,
            "url": f"http://{endpoint.reached_as}",
            "device": facts.device,
        }
        started |= {"positions": facts.positions, "drafters": list(facts.drafters), "pid": os.getpid()}
        started |= {"needs_token": self._site.permissions.needs_token}
        LOG.info("ready", extra=started)
        self._started(started)

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def _on_signal(self) -> None:
        """Stop after the accepted requests; on a second signal, immediately."""
        self._signals += 1
        LOG.info("stopping" if self._signals == 1 else "stopping immediately")
        self._decoder.drain()
        self._changed.set()

    def _reload(self) -> None:
        if not self._settings.tokens:
            return
        try:
            self._site.permissions = Permissions.load(self._settings.tokens)
        except DraftstoreError as error:
            why = {"error": str(error)}
            LOG.warning("the token file cannot be used; the earlier tokens stay valid", extra=why)
        else:
            LOG.info("tokens reloaded")
