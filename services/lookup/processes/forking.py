"""The processes of the service: forked by one supervisor, tied to it however it ends.

Every child holds the reading end of a pipe whose writing end the supervisor alone holds. When the supervisor is gone,
even by `kill -9`, the kernel closes that end, and the children stop as they would on SIGTERM.
"""

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LOG = logging.getLogger(__name__)

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
CRASHED = 70
"""Exit status of a child after an error that nobody expected (EX_SOFTWARE)."""
REFUSED = 78
"""Exit status of a child that cannot do what it is told, and has reported why (EX_CONFIG)."""


class SupervisorLink:
    """The child's side of the pipes to its supervisor: one for a report, one that closes when the supervisor ends."""

    def __init__(self, life: int, report: int) -> None:
        """Hold both pipes.

        Args:
            life: reads as closed once the supervisor is gone.
            report: takes what the supervisor should know.
        """
        self._life = life
        self._report = report

    def report(self, **fields: Any) -> None:
        """Tell the supervisor something, at most once: a start that went well, or why it did not."""
        with suppress(OSError):  # it is gone: `watch` notices that
            os.write(self._report, json.dumps(fields).encode())
        with suppress(OSError):
            os.close(self._report)

    def watch(self, leave: Callable[[], object], patience: float) -> None:
        """See to it that this process ends soon after its supervisor.

        Args:
            leave: called in a thread when the supervisor is gone.
            patience: seconds after which the process is ended anyhow, even if its event loop hangs.
        """

        def wait() -> None:
            os.read(self._life, 1)
            LOG.warning("the supervisor is gone")
            with suppress(Exception):
                leave()
            time.sleep(patience)
            os._exit(CRASHED)

        threading.Thread(target=wait, name="supervisor", daemon=True).start()


class Spawner:
    """Forks children, and holds their pipes."""

    def __init__(self) -> None:
        """Make the pipe that tells children that we live."""
        self._life, self._alive = os.pipe()  # not inherited by programs, but by forks

    def fork(self, main: Callable[[SupervisorLink], int], forget: Callable[[], None]) -> tuple[int, int]:
        """Start a child.

        Args:
            main: run by the child, which ends with the exit status that it returns.
            forget: called in the child first, to close what is the supervisor's alone.

        Returns:
            process id, and a descriptor where its report can be read; the end of file comes with its end.
        """
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal in the first moments of the child would reach us through what it inherits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = _fork()
            if pid == 0:
                self._become_child(main, forget, reading, writing)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        return pid, reading

    def _become_child(
        self, main: Callable[[SupervisorLink], int], forget: Callable[[], None], reading: int, writing: int
    ) -> None:
        """Run the child; never returns."""
        status = CRASHED
        try:
            signal.set_wakeup_fd(-1)
            for number in HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # Ctrl-C reaches all; the supervisor decides what it means
            os.close(self._alive)
            os.close(reading)
            forget()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            status = main(SupervisorLink(self._life, writing))
        except BaseException:
            LOG.exception("an unexpected error ends this process")
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)  # not through the stack that was forked with us

    def close(self) -> None:
        """Let children know that we are gone."""
        os.close(self._alive)
        os.close(self._life)


def _fork() -> int:
    """Fork; objects that are there now are never looked at by the child's collector, so their pages stay shared."""
    gc.freeze()
    with warnings.catch_warnings():
        # numpy's linear algebra keeps idle threads, which survive no fork; the library is prepared for that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def ended_as(status: int) -> str:
    """Return how a process ended, from the status of `os.waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
