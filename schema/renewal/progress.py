"""Progress as log lines, one every few seconds and one at the end of each step, and the durations of steps."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

Logger = logging.Logger | logging.LoggerAdapter[Any]
SECONDS = 5.0
"""Seconds between two lines about one step."""


class StepLog:
    """Logs the progress of a step, and always the end of a step of known size.

    Args:
        logger: where the lines go.
        step: a word such as `sorting`.
        unit: the counted unit, such as `tokens`.
        on_report: called with the step at every report.
    """

    def __init__(
        self, logger: Logger, step: str, unit: str, on_report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._logger, self._step, self._unit, self._on_report = logger, step, unit, on_report
        self._begin: tuple[float, int] | None = None
        self._last = monotonic()

    def __call__(self, done: int, total: int | None, detail: str = "") -> None:
        """Report the amount done so far, the total (None if unknown), and further details."""
        self._on_report(self._step)
        now = monotonic()
        begin, before = self._begin = self._begin or (now, done)
        if now - self._last < SECONDS and (total is None or done < total):
            return
        self._last = now
        share = f" of {total:,} {self._unit} ({done / total:.0%})" if total else f" {self._unit}"
        speed = (
            f"{(done - before) / (now - begin):,.0f} {self._unit}/s" if done > before and now > begin else ""
        )
        text = ", ".join(filter(None, (detail, f"{done:,}{share}", speed)))
        self._logger.info("%s: %s", self._step, text)


class StepLogs:
    """The steps of one build: the time up to a report belongs to the step that reports.

    Attributes:
        timings: seconds of each step, and under `other` those after the last report.
    """

    def __init__(self, logger: Logger) -> None:
        self.timings: dict[str, float] = {}
        self._steps: dict[str, StepLog] = {}
        self._logger, self._last = logger, monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Measure the work in the block; may be entered again on a retry."""
        self._last = monotonic()
        try:
            yield
        finally:
            self._spend("other")

    def step(self, name: str, unit: str) -> StepLog:
        """Return the log of a step; the same object for the same name."""
        return self._steps.setdefault(name, StepLog(self._logger, name, unit, self._spend))

    def _spend(self, name: str) -> None:
        now = monotonic()
        self.timings[name] = round(self.timings.get(name, 0.0) + now - self._last, 6)
        self._last = now
