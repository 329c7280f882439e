"""Programs of Prefect that run until this process ends: started again when they end, ended when it ends.

A worker starts every flow run in its own session; when stopped, it waits for all of them, and when killed, it leaves
them running. So this process adopts orphans of its services (as their subreaper), and ends flow runs before the worker.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import psutil

CHECKOUT = Path(__file__).resolve().parent.parent
ENGINE = "prefect.engine"
"""Argument of the processes of flow runs."""
GRACE_SECONDS = 10.0
"""Seconds that flow runs, worker and server each have to end by themselves."""
DEATHS = 5
WITHIN_SECONDS = 600.0
"""A program that ended so often within this time is not started again."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PRCTL = ctypes.CDLL(None).prctl
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


class LocalError(click.ClickException):
    """A program of Prefect did not start, or ended again and again."""


def prefect_command(*arguments: str) -> list[str]:
    """Return the command line of this environment's `prefect`."""
    return [sys.executable, "-m", "prefect", *arguments]


class Restarts:
    """When a program that ended is started again: after 1, 2, 4 and 8 seconds, then not at all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=DEATHS)

    def delay(self) -> float | None:
        """Count a death; return the seconds to wait before the next start, None to give up."""
        now = self._clock()
        self._deaths.append(now)
        recent = sum(now - death < WITHIN_SECONDS for death in self._deaths)
        return None if recent >= DEATHS else 2.0 ** (recent - 1)


class Service:
    """A program that shall run: its process, and how to start another one."""

    def __init__(
        self, name: str, environment: dict[str, str], *arguments: str, log: Path | None = None
    ) -> None:
        """Start `prefect` with these arguments."""
        self.name, self.log = name, log
        self._environment, self._arguments = environment, arguments
        self._restarts = Restarts()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start it; it gets SIGTERM when this program ends in any way."""
        with self.log.open("ab") if self.log else contextlib.nullcontext() as output:
            return subprocess.Popen(  # noqa: S603 - our own arguments
                prefect_command(*self._arguments),
                cwd=CHECKOUT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if self.log else None,
                start_new_session=True,  # Ctrl-C goes only to this program
                preexec_fn=lambda: _PRCTL(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
            )

    def restart(self, status: int) -> None:
        """Start it again after its process ended."""
        how = f"the {self.name} ended by itself with status {status}"
        delay = self._restarts.delay()
        if delay is None:
            message = (
                f"{how}, {DEATHS} times within {WITHIN_SECONDS / 60:.0f} minutes: it is not started again"
            )
            raise LocalError("\n".join([message, *self.last_lines()]))
        click.echo(f"{how}: starting it again in {delay:.0f} s", err=True)
        time.sleep(delay)
        self.process = self._start()

    def last_lines(self) -> list[str]:
        """Return the end of its log."""
        if self.log is None:
            return []
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [f"the end of {self.log}:", *lines[-15:]]


def keep_running(*services: Service) -> None:
    """Start services again whenever they end, for ever."""
    while True:
        pid, status = os.wait()  # also takes orphans of services
        for service in services:
            if service.process.pid == pid:
                service.process.returncode = os.waitstatus_to_exitcode(status)
                service.restart(service.process.returncode)


@contextlib.contextmanager
def everything_ended() -> Iterator[None]:
    """Adopt all descendants, and end them on exit, including by SIGTERM."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    _PRCTL(_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # do not interrupt the cleanup
        # Flow runs first: a worker that ends would not give them time to update the catalogue. Once more at the end, as
        # the worker may have started one meanwhile.
        for program in (ENGINE, "worker", "server", ENGINE):
            _end(program, psutil.Process().children(recursive=True))
        # The embedded PostgreSQL ends with its last client; one with other clients stays.
        psutil.wait_procs(psutil.Process().children(recursive=True), GRACE_SECONDS)


def end_left_over(state: Path) -> None:
    """End flow runs, worker and server that a killed process left at work."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of another user, or ended meanwhile
            if process.environ().get("PREFECT_HOME") == str(state.resolve()):
                left.append(process)
    for program in (ENGINE, "worker", "server", ENGINE):
        _end(program, left)


def _end(program: str, processes: list[psutil.Process]) -> None:
    """End the processes with an argument: SIGTERM, then SIGKILL after a while."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if program in process.cmdline():
                process.terminate()
                found.append(process)
    for process in psutil.wait_procs(found, GRACE_SECONDS)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
