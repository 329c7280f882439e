"""Progress as log lines: one every few seconds, and the last one of a step."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from draftstore.errors import counted
from draftstore.stores.rest.build import Progress

Logger = logging.Logger | logging.LoggerAdapter[Any]
SECONDS = 5.0
"""Seconds between two lines about one step."""


class StepLog:
    """Logs the progress of a step, at most once in `seconds`, and always the end of a step of known size."""

    def __init__(
        self,
        logger: Logger,
        step: str,
        unit: str,
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
        on_report: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without output; `step` and `unit` are words such as `sorting` and `tokens`."""
        self._logger, self._step, self._unit = logger, step, unit
        self._seconds, self._clock, self._on_report = seconds, clock, on_report
        self._begin: tuple[float, int] | None = None
        self._last = clock()

    def amount(self, done: int, total: int) -> None:
        """Report a step of known size."""
        share = f" of {total:,} {self._unit} ({done / total:.0%})" if total else f" {self._unit}"
        self._report(done, f"{self._step}: {done:,}{share}", last=done >= total)

    def tokenized(self, documents: int, tokens: int, _characters: int) -> None:
        """Report tokens of a corpus of unknown size."""
        self._report(tokens, f"{self._step}: {counted(documents, 'document')}, {tokens:,} tokens", last=False)

    def _report(self, done: int, text: str, *, last: bool) -> None:
        self._on_report()
        now = self._clock()
        if self._begin is None:
            self._begin = now, done
        if last or now - self._last >= self._seconds:
            elapsed, more = now - self._begin[0], done - self._begin[1]
            speed = f", {more / elapsed:,.0f} {self._unit}/s" if more and elapsed else ""
            self._logger.info("%s%s", text, speed)
            self._last = now


class StepLogs:
    """The steps of one build: logs each, and measures how long it took.

    The time up to a report is attributed to the reporting step.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._steps: dict[str, StepLog] = {}
        self._seconds: dict[str, float] = {}
        self._last = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Measure the work in the block; may be entered again on a retry."""
        self._last = time.monotonic()
        try:
            yield
        finally:
            self._spend("other")

    def step(self, name: str, unit: str) -> StepLog:
        """Return the log of a step; the same object for the same name."""
        if name not in self._steps:
            self._steps[name] = StepLog(self._logger, name, unit, on_report=partial(self._spend, name))
        return self._steps[name]

    def rest(self) -> Progress:
        """Return the progress callbacks of a REST build."""
        return Progress(
            tokenized=self.step("tokenizing", "tokens").tokenized,
            sorted=self.step("sorting", "tokens").amount,
            hashed=self.step("hashing", "bytes").amount,
        )

    def timings(self) -> dict[str, float]:
        """Return the seconds of each step, and under `other` the time after the last report."""
        return {name: round(seconds, 3) for name, seconds in self._seconds.items()}

    def _spend(self, name: str) -> None:
        now = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now
