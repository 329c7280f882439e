"""The supervisor: opens the sockets, forks the service's processes, restarts those that die, stops them in order.

It opens no store and no database and runs no asyncio event loop: errors in stores and requests happen in processes
that it can replace.
"""

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from draftstore.errors import DraftstoreError, LookupServiceError
from services.common import logs
from services.lookup.processes import web as web_process
from services.lookup.processes import worker
from services.lookup.processes.children import Child
from services.lookup.processes.forking import HANDLED, Spawner
from services.lookup.processes.inheritance import WEB, Inheritance
from services.lookup.settings import LookupSettings
from services.lookup.stores import warming

LOG = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two checks for hanging processes."""
WEB_SECONDS = 2.0
"""Seconds that the HTTP process has to end; it stops first, as it needs the workers for its last answers."""
END_SECONDS = 3.0
"""Seconds beyond the drain time that a worker has to end."""


def run(settings: LookupSettings, started: Callable[[dict[str, Any]], None] = lambda _: None) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: settings of this run.
        started: called with a description of stores, addresses and processes once all are ready.

    Returns:
        Exit status: 0 after an orderly end, 1 after a forced one.

    Raises:
        DraftstoreError: the service cannot start; nothing is left running.
    """
    logs.configure(settings.log_format, settings.log_level)
    settings.check()
    inherited = Inheritance.open(settings)
    try:
        warming.load_kernels()
        return Supervisor(inherited, started).run()
    finally:
        inherited.close()


class Supervisor:
    """The loop that supervises the processes."""

    def __init__(self, inherited: Inheritance, started: Callable[[dict[str, Any]], None]) -> None:
        self._inherited = inherited
        self._started = started
        self._settings = inherited.settings
        self._spawner = Spawner()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._signals = socket.socketpair()
        self._workers = [
            Child(f"worker-{number}", partial(worker.main, inherited, number), inherited.figures.slot(number))
            for number in range(self._settings.workers)
        ]
        slot = inherited.web_figures.slot(0)
        self._web = [Child(WEB, partial(web_process.main, inherited), slot)] if inherited.http else []
        self._serving = False
        self._stopping = False
        self._hurry = False
        self._looked = self._awake = time.monotonic()
        """When it last looked for hanging processes, and since when it has done so without a break."""

    @property
    def _children(self) -> list[Child]:
        return [*self._workers, *self._web]

    def run(self) -> int:
        """Start all processes, keep them running, stop them.

        Returns:
            Exit status.

        Raises:
            LookupServiceError: they cannot start.
        """
        with self._signals_caught():
            try:
                for child in self._children:
                    self._start(child)
                while not self._stopping:
                    self._step(self._until_next())
                self._drain()
            finally:
                self._kill_all()
                self._spawner.close()
                self._selector.close()
        return int(self._hurry)

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Catch signals and let them wake the selector."""
        for end in (self._wakeup, self._signals):
            end.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in HANDLED}
        woken = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wakeup.close()
            self._signals.close()

    def _start(self, child: Child) -> None:
        child.start(self._spawner, self._forget)
        assert child.reading is not None
        self._selector.register(child.reading, selectors.EVENT_READ, child)

    def _forget(self) -> None:
        """Close the supervisor's own descriptors in a forked process."""
        for child in self._children:
            if child.reading is not None:
                os.close(child.reading)
        self._selector.close()
        self._wakeup.close()
        self._signals.close()

    def _until_next(self) -> float:
        """Return the seconds until the next scheduled action."""
        times = [child.due for child in self._children if child.due is not None]
        return max(min([time.monotonic() + LOOK, *times]) - time.monotonic(), 0.0)

    def _step(self, seconds: float) -> None:
        """Wait for signals and reports, and handle them."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._receive()
            else:
                self._hear(key.data)
        self._reap()
        if not self._stopping:
            self._restart_due()
            self._end_hanging()

    def _receive(self) -> None:
        """Handle received signals."""
        with suppress(BlockingIOError):
            for number in self._wakeup.recv(4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._hurry = self._stopping
                    self._stopping = True
                elif number == signal.SIGHUP:
                    self._reload()

    def _reload(self) -> None:
        """Reread tokens and certificate, and tell the children if they are valid."""
        files = {"tokens": self._settings.tokens, "certificate": self._settings.tls_cert}
        if not any(files.values()):
            LOG.info("SIGHUP changes nothing: there is no file of tokens, and no certificate")
            return
        try:
            self._inherited.reload()
        except DraftstoreError as error:
            LOG.warning("a file cannot be used, the earlier one stays valid", extra={"error": str(error)})
            return
        LOG.info("read again", extra={name: str(file) for name, file in files.items() if file})
        for child in self._children:
            if child.ready:  # others inherit the new permissions or read them when they start
                child.signal(signal.SIGHUP)

    def _hear(self, child: Child) -> None:
        """Handle a report; call `started` once all processes are ready."""
        reading = child.reading
        assert reading is not None
        child.listen()
        if child.reading is not None:
            return
        self._selector.unregister(reading)
        if not self._serving and "failed" in child.said:
            raise LookupServiceError(child.said["failed"])
        if not self._serving and all(other.ready for other in self._children):
            self._serving = True
            self._started(self._describe())

    def _describe(self) -> dict[str, Any]:
        """Return a description of the running service."""
        inherited, settings = self._inherited, self._settings
        http = settings.http._replace(port=inherited.http_port or 0).reached_as if settings.http else None
        return {
            "pid": os.getpid(),
            "socket": str(inherited.unix.path),
            "listen": str(settings.listen._replace(port=inherited.tcp_port or 0))
            if settings.listen
            else None,
            "tls": inherited.tls is not None,
            "url": f"http://{http}/" if http else None,
            "http_socket": str(inherited.http_unix.path) if inherited.http_unix else None,
            "needs_token": inherited.permissions.needs_token,
            "workers": [child.pid for child in self._workers],
            "web": self._web[0].pid if self._web else None,
            "releases": self._workers[0].said.get("releases", []),
        }

    def _reap(self) -> None:
        """Handle processes that have ended."""
        for child in self._children:
            pid = child.pid
            how = child.reap()
            if how is None:
                continue
            if self._stopping:
                LOG.info("process ended", extra={"child": child.name, "pid": pid, "how": how})
                continue
            if not self._serving:
                self._hear_last(child)
                raise LookupServiceError(
                    f"{child.name} ended with {how} before it was ready: the log above says more"
                )
            pause = child.plan_restart()
            extra = {"child": child.name, "pid": pid, "how": how, "restart_in": round(pause, 3)}
            LOG.error("process died", extra=extra)

    def _hear_last(self, child: Child) -> None:
        """Handle the last report of a process that has ended."""
        while child.reading is not None:
            self._hear(child)

    def _restart_due(self) -> None:
        """Restart processes whose delay is over."""
        now = time.monotonic()
        for child in self._children:
            if child.due is not None and child.due <= now:
                while child.reading is not None:
                    self._hear(child)
                child.count_restart()
                self._start(child)

    def _end_hanging(self) -> None:
        """Kill processes whose event loop hangs, unless this one was held up too, as in a paused container."""
        now, patience = time.monotonic(), self._settings.hang_seconds
        if now - self._looked > patience / 2:
            self._awake = now
        self._looked = now
        for child in self._children:
            if (silence := min(child.silence, now - self._awake)) > patience:
                extra = {"child": child.name, "pid": child.pid, "silence": round(silence, 1)}
                LOG.error("process hangs, it is ended", extra=extra)
                child.signal(signal.SIGKILL)

    def _drain(self) -> None:
        """Announce the end, then stop the HTTP process and the workers, each with time to complete open requests."""
        self._inherited.figures.stopping = True
        if self._web:
            LOG.info("about to stop", extra={"seconds": self._settings.notice_seconds})
            self._wait(self._settings.notice_seconds, lambda: True)
        LOG.info("draining", extra={"seconds": self._settings.limits.drain_seconds})
        self._end(self._web, self._web, WEB_SECONDS)
        self._end(self._workers, self._children, self._settings.limits.drain_seconds + END_SECONDS)

    def _end(self, asked: Sequence[Child], awaited: Sequence[Child], seconds: float) -> None:
        """Ask processes to end and wait for processes that were asked."""
        for child in asked:
            child.signal(signal.SIGTERM)
        self._wait(seconds, lambda: any(child.pid for child in awaited))

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        """Handle signals and reports for some seconds, while a condition holds and nobody is in a hurry."""
        end = time.monotonic() + seconds
        while not self._hurry and condition() and (left := end - time.monotonic()) > 0:
            self._step(left)

    def _kill_all(self) -> None:
        """Kill all remaining processes."""
        for child in self._children:
            if child.pid:
                level = logging.WARNING if self._serving else logging.DEBUG  # a failed start says why
                LOG.log(level, "process is killed", extra={"child": child.name, "pid": child.pid})
            child.signal(signal.SIGKILL)
        for child in self._children:
            if child.pid:
                with suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
