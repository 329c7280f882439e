"""Progress as lines of a log: one every few seconds, and the last one of a step."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from draftstore.build import Progress
from draftstore.errors import counted

Logger = logging.Logger | logging.LoggerAdapter[Any]
SECONDS = 5.0
"""Between two lines about one step."""


class StepLog:
    """Writes how far a step is, at most once in `seconds`; the end of a step of known size always."""

    def __init__(
        self, logger: Logger, step: str, unit: str, *, seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Write nothing yet.

        Args:
            logger: where lines go.
            step: what is done, such as `sorting`.
            unit: of the amounts, such as `tokens`.
            seconds: between two lines.
            clock: seconds of a steady clock.
        """
        self._logger, self._step, self._unit = logger, step, unit
        self._seconds, self._clock = seconds, clock
        self._begin: tuple[float, int] | None = None
        self._last = clock()
        self.elapsed = 0.0

    def amount(self, done: int, total: int) -> None:
        """Report a step of known size."""
        share = f" of {total:,} {self._unit} ({done / total:.0%})" if total else f" {self._unit}"
        self._report(done, f"{self._step}: {done:,}{share}", last=done >= total)

    def tokenized(self, documents: int, tokens: int, _characters: int) -> None:
        """Report tokens of a corpus of unknown size."""
        self._report(tokens, f"{self._step}: {counted(documents, 'document')}, {tokens:,} tokens", last=False)

    def _report(self, done: int, text: str, *, last: bool) -> None:
        now = self._clock()
        if self._begin is None:
            self._begin = now, done
        self.elapsed = now - self._begin[0]
        if last or now - self._last >= self._seconds:
            more = done - self._begin[1]
            speed = f", {more / self.elapsed:,.0f} {self._unit}/s" if more and self.elapsed else ""
            self._logger.info("%s%s", text, speed)
            self._last = now


class StepLogs:
    """The steps of one build: each writes lines to a log, and together they know how long each took."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._steps: dict[str, StepLog] = {}
        self._seconds = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """Measure how long the work takes in all; several times, where it is tried again."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - begin

    def step(self, name: str, unit: str) -> StepLog:
        """Return a step's log, the same one for the same name."""
        return self._steps.setdefault(name, StepLog(self._logger, name, unit))

    def rest(self) -> Progress:
        """Return what a REST build reports to."""
        return Progress(
            tokenized=self.step("tokenizing", "tokens").tokenized,
            sorted=self.step("sorting", "tokens").amount,
            hashed=self.step("hashing", "bytes").amount,
        )

    def timings(self) -> dict[str, float]:
        """Return seconds: of each step that reported, from its first report to its last, and of all the rest."""
        steps = {name: step.elapsed for name, step in self._steps.items() if step.elapsed}
        rest = max(self._seconds - sum(steps.values()), 0.0)
        return {name: round(seconds, 3) for name, seconds in {**steps, "other": rest}.items()}
