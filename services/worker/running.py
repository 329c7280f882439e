"""The worker process: loads the model, serves, and shuts down in order."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvloop
from prometheus_client import disable_created_metrics

from draftstore.errors import DraftstoreError, LookupServiceError
from services.common import logs
from services.common.guards import own_names
from services.common.http_server import HttpServer
from services.common.permissions import Permissions
from services.common.sockets import open_tcp, port_of
from services.worker.app import WorkerSite, make_app
from services.worker.decoder import Decoder, DecoderState
from services.worker.figures import WorkerMetrics
from services.worker.response_log import ResponseLog, older
from services.worker.settings import WorkerSettings
from services.worker.work import Engine

LOG = logging.getLogger(__name__)
LIBRARIES = ("transformers", "huggingface_hub", "accelerate", "httpx", "torch", "filelock", "urllib3")
LAST_ANSWERS = 2.0
"""Seconds that clients have to read the last answers."""
CUT_SECONDS = 10.0
"""Seconds for the current forward pass to end after a cancellation."""
Load = Callable[[], Engine]
Started = Callable[[dict[str, Any]], None]


def run(settings: WorkerSettings, load: Load, started: Started = lambda _: None) -> int:
    """Serve a model until SIGTERM or SIGINT.

    Args:
        settings: settings of this run.
        load: loads the model; called in the decoding thread.
        started: called with the served model and addresses, once the model is loaded.

    Returns:
        Exit status: 0 after an orderly end.

    Raises:
        DraftstoreError: the worker cannot start.
        Exception: whatever loading the model raised.
    """
    logs.configure(settings.log_format, settings.log_level)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    settings.check()
    permissions = Permissions.load(settings.tokens) if settings.tokens else Permissions.open_to_all()
    figures = WorkerMetrics()
    log = _open_log(settings, figures)
    try:
        sockets = open_tcp(settings.endpoint, "--host or --port")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            worker = Worker(settings, load, figures, permissions, log, started)
            status = runner.run(worker.serve(sockets))
    finally:
        if log:
            log.close()
    if worker.failure:
        raise worker.failure
    if not worker.ended:
        # A thread inside a forward pass, or loading a model, cannot be stopped otherwise.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_log(settings: WorkerSettings, figures: WorkerMetrics) -> ResponseLog | None:
    """Open the response log and warn about its privacy."""
    if settings.response_log is None:
        return None
    path = settings.response_log
    log = ResponseLog(path, settings.response_log_bytes, figures.logged)
    LOG.warning(
        "prompts and answers are kept: whoever can read these files can read what people asked and were answered",
        extra={"files": [str(path), str(older(path))], "bytes": settings.response_log_bytes},
    )
    return log


class Worker:
    """The event loop's part of a run.

    Attributes:
        failure: what loading the model raised, or why decoding ended by itself.
        ended: whether the decoding thread has ended.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        load: Load,
        figures: WorkerMetrics,
        permissions: Permissions,
        log: ResponseLog | None,
        started: Started,
    ) -> None:
        """Prepare a run; the arguments are those of `run`."""
        self._settings = settings
        self._started = started
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder = Decoder(
            load, figures, queue=settings.queue, changed=self._notify, keep=log.put if log else None
        )
        self._site = WorkerSite(self._decoder, figures, permissions, settings)
        self._signals = 0
        self.failure: BaseException | None = None
        self.ended = False

    async def serve(self, sockets: list[Any]) -> int:
        """Serve until told to stop; return the exit status."""
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        port = port_of(sockets)
        settings = self._settings
        hosts = own_names(settings.endpoint, settings.allow_hosts, tokens=settings.tokens is not None)
        server = HttpServer(make_app(self._site, hosts), LAST_ANSWERS)
        serving = asyncio.create_task(server.serve(sockets))
        LOG.info("loading the model", extra={"port": port})
        self._decoder.start()
        following = asyncio.create_task(self._follow(port))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            self.failure = LookupServiceError(
                "the HTTP side has ended: see the log, and start the worker again"
            )
        server.stop()
        await serving
        self.ended = self._decoder.join(0 if self._decoder.state is not DecoderState.ENDED else CUT_SECONDS)
        following.cancel()
        if not self.failure:
            LOG.info("stopped")
        return 0

    async def _follow(self, port: int) -> None:
        """Report the start, wait for the signal to stop, and let the current request complete."""
        decoder = self._decoder
        await self._until(lambda: decoder.state is not DecoderState.LOADING)
        if decoder.ready:
            self._announce(port)
        await self._until(lambda: decoder.state is DecoderState.ENDED or self._signals > 0)
        if self._signals and decoder.engine is not None:
            await self._until(
                lambda: decoder.state is DecoderState.ENDED or self._signals > 1, self._settings.grace_seconds
            )
            decoder.hurry()
            await self._until(lambda: decoder.state is DecoderState.ENDED, CUT_SECONDS)
        if decoder.failure:
            self.failure = decoder.failure
        elif not self._signals:
            self.failure = LookupServiceError(
                "the decoding thread has ended: see the log, and start the worker again"
            )

    async def _until(self, test: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not test():
                    await self._changed.wait()
                    self._changed.clear()

    def _announce(self, port: int) -> None:
        engine = self._decoder.engine
        assert engine is not None
        facts = engine.facts
        endpoint = self._settings.endpoint._replace(port=port)
        told = {
            "model": facts.name,
            "url": f"http://{endpoint.reached_as}",
            "device": facts.device,
            "positions": facts.positions,
            "drafters": list(facts.drafters),
            "needs_token": self._site.permissions.needs_token,
            "pid": os.getpid(),
        }
        LOG.info("ready", extra=told)
        self._started(told)

    def _notify(self) -> None:
        """Wake the event loop; called from the decoding thread."""
        with suppress(RuntimeError):  # the loop has ended
            if self._loop:
                self._loop.call_soon_threadsafe(self._changed.set)

    def _on_signal(self) -> None:
        """Stop after the current request; on a second signal at once."""
        self._signals += 1
        LOG.info("stopping" if self._signals == 1 else "stopping at once")
        self._decoder.drain()
        self._notify()

    def _reload(self) -> None:
        """Reread the token file and apply it if it is valid."""
        if not self._settings.tokens:
            return
        try:
            self._site.permissions = Permissions.load(self._settings.tokens)
        except DraftstoreError as error:
            LOG.warning(
                "the file of tokens cannot be used, the earlier tokens stay valid",
                extra={"error": str(error)},
            )
        else:
            LOG.info("tokens read again")
