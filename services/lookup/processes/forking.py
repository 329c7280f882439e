"""Forking the processes of the service and tying their life to the supervisor's.

Every child holds the read end of a pipe; only the supervisor holds the write end. When the supervisor ends, even by
`kill -9`, the kernel closes that end, and the children stop as they would on SIGTERM.
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
"""Exit status of a child after an unexpected error (EX_SOFTWARE)."""
REFUSED = 78
"""Exit status of a child with invalid settings, after its report (EX_CONFIG)."""


class SupervisorLink:
    """The child's ends of the pipes to its supervisor: one for a report, one that closes when the supervisor ends."""

    def __init__(self, life: int, report: int) -> None:
        """Hold both pipes.

        Args:
            life: descriptor that reads end of file once the supervisor is gone.
            report: descriptor for the report.
        """
        self._life = life
        self._report = report

    def report(self, **fields: Any) -> None:
        """Report to the supervisor, at most once: a successful start, or why it failed."""
        with suppress(OSError):  # the supervisor is gone: `watch` notices that
            os.write(self._report, json.dumps(fields).encode())
        with suppress(OSError):
            os.close(self._report)

    def watch(self, leave: Callable[[], object], patience: float) -> None:
        """Make sure that this process ends soon after its supervisor.

        Args:
            leave: called in a thread when the supervisor is gone.
            patience: seconds after which the process is killed, even if its event loop hangs.
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
    """Forks children and holds their pipes."""

    def __init__(self) -> None:
        """Create the pipe that tells children that the supervisor lives."""
        self._life, self._alive = os.pipe()  # inherited by forks, closed on exec

    def fork(self, main: Callable[[SupervisorLink], int], forget: Callable[[], None]) -> tuple[int, int]:
        """Start a child.

        Args:
            main: main function of the child; returns its exit status.
            forget: called first in the child, to close what belongs to the supervisor alone.

        Returns:
            Process id, and a descriptor for reading its report, which reads end of file when it ends.
        """
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # Until the child resets its handlers, a signal to it would reach the supervisor through inherited descriptors.
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
            )  # Ctrl-C reaches the whole group; the supervisor decides what to do
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
            os._exit(status)  # skips the stack inherited from the parent

    def close(self) -> None:
        """Signal the end of the supervisor to its children."""
        os.close(self._alive)
        os.close(self._life)


def _fork() -> int:
    """Fork with the existing objects frozen: the child's garbage collector skips them, so their pages stay shared."""
    gc.freeze()
    with warnings.catch_warnings():
        # The idle threads of numpy's linear algebra do not survive a fork; the library handles that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def ended_as(status: int) -> str:
    """Describe how a process ended, from the status of `os.waitpid`."""
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
