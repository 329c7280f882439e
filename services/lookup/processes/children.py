"""The supervisor's view of one child process: started, ready, dead, restarted with a delay."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from services.lookup.figures.counting import Slot
from services.lookup.processes.forking import Spawner, SupervisorLink, ended_as

LOG = logging.getLogger(__name__)

STABLE = 10.0
"""Seconds after which the end of a process is unrelated to its start."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
"""Maximum seconds until a dead process is restarted; the pause doubles while it dies early."""
_REPORT = 1 << 20


class Child:
    """One child process."""

    def __init__(self, name: str, main: Callable[[SupervisorLink], int], slot: Slot | None = None) -> None:
        """Describe a process without starting it.

        Args:
            name: name for the log.
            main: main function of the process.
            slot: its slot of counters.
        """
        self.name = name
        self.pid = 0
        self.ready = False
        self.reading: int | None = None
        """Descriptor for reading its report."""
        self.due: float | None = None
        """Time of its next start."""
        self.said: dict[str, Any] = {}
        """Its report since the last start."""
        self._main = main
        self._slot = slot
        self._started = 0.0
        self._deaths = 0
        self._heard = b""

    def start(self, spawner: Spawner, forget: Callable[[], None]) -> None:
        """Fork the process."""
        self.due, self.ready, self.said, self._heard = None, False, {}, b""
        self._started = time.monotonic()
        self.pid, self.reading = spawner.fork(self._main, forget)

    def listen(self) -> None:
        """Read its report; it is complete at end of file."""
        assert self.reading is not None
        data = os.read(self.reading, _REPORT)
        self._heard += data
        if data:
            return
        os.close(self.reading)
        self.reading = None
        with suppress(ValueError):  # it died before or while reporting
            self.said = json.loads(self._heard)
            self.ready = bool(self.said.get("ready"))
            if self.ready:
                seconds = round(time.monotonic() - self._started, 3)
                LOG.info("process ready", extra={"child": self.name, "pid": self.pid, "seconds": seconds})

    def reap(self) -> str | None:
        """Return how it ended; None if it is running or was not started."""
        if not self.pid:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return None
        self.pid, self.ready = 0, False
        if self._slot:
            self._slot.end()
        return ended_as(status)

    def plan_restart(self) -> float:
        """Schedule the restart and return the seconds until then."""
        now = time.monotonic()
        self._deaths = 0 if now - self._started > STABLE else self._deaths + 1
        pause = min(FIRST_PAUSE * 2 ** (self._deaths - 1), LONGEST_PAUSE) if self._deaths else 0.0
        self.due = now + pause
        return pause

    @property
    def silence(self) -> float:
        """Seconds since its last sign of life, once it is ready."""
        return self._slot.silence if self.ready and self._slot else 0.0

    def count_restart(self) -> None:
        """Count a restart."""
        if self._slot:
            self._slot.restarted()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal if it is running."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
