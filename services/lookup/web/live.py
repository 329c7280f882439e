"""Live figures of the service: what changed between two readings of its counters."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from services.lookup.web.messages import FigureRow, FiguresReply, ReleaseFigures

WINDOW = 10.0
"""Seconds over which rates are computed: short enough to see changes, long enough for percentiles."""
HISTORY = 60
"""Seconds of history in the curve of queries."""


class Totals(NamedTuple):
    """The counters of one release since the start; `seconds` has one more bucket than there are bounds."""

    queries: int = 0
    contexts: int = 0
    misses: int = 0
    nodes: int = 0
    matched: int = 0
    """Sum of the match lengths of all contexts."""
    failures: int = 0
    swaps: int = 0
    seconds: tuple[int, ...] = ()
    """Queries by the time of their lookup."""

    def plus(self, other: "Totals") -> "Totals":
        """Add the counts of another release."""
        sums = [a + b for a, b in zip(self[:-1], other[:-1], strict=True)]
        return Totals._make((*sums, self._buckets(other, 1)))

    def minus(self, earlier: "Totals") -> "Totals":
        """Subtract an earlier reading; counters that were reset since then count as zero."""
        counts = [max(a - b, 0) for a, b in zip(self[:-1], earlier[:-1], strict=True)]
        return Totals._make((*counts, self._buckets(earlier, -1)))

    def _buckets(self, other: "Totals", sign: int) -> tuple[int, ...]:
        width = max(len(self.seconds), len(other.seconds))
        ours, theirs = (counts + (0,) * (width - len(counts)) for counts in (self.seconds, other.seconds))
        return tuple(max(a + sign * b, 0) for a, b in zip(ours, theirs, strict=True))


class Reading(NamedTuple):
    """All counters at one moment."""

    totals: Mapping[str, Totals]
    """Totals by release; the empty name is for requests that belong to none."""
    bounds: Sequence[float] = ()
    """Upper bounds of the buckets of `Totals.seconds`, in seconds."""
    workers: int = 0
    workers_ready: int = 0
    restarts: int = 0
    connections: int = 0
    in_flight: int = 0
    waiting: int = 0


class Live:
    """Keeps the readings of the last minute."""

    def __init__(self, read: Callable[[], Reading], clock: Callable[[], float] = time.monotonic) -> None:
        """Take the first reading now.

        Args:
            read: returns the present counters.
            clock: monotonic time in seconds.
        """
        self._read = read
        self._clock = clock
        self._start = clock()
        self._readings: deque[tuple[float, Reading]] = deque([(self._start, read())], maxlen=HISTORY + 1)

    def sample(self) -> None:
        """Read the counters; called once per second."""
        self._readings.append((self._clock(), self._read()))

    def report(self, allowed: Callable[[str], bool] = lambda _: True) -> FiguresReply:
        """Return the figures of the releases that the client may see, and their sum."""
        now, reading = self._clock(), self._read()
        then, earlier = next(
            (pair for pair in reversed(self._readings) if now - pair[0] >= WINDOW), self._readings[0]
        )
        names = sorted(filter(allowed, reading.totals))  # including "": requests that belong to no release
        seconds = max(now - then, 1e-3)
        rows = {
            name: _row(reading.totals[name], earlier.totals.get(name, Totals()), seconds, reading.bounds)
            for name in names
            if name
        }
        return FiguresReply(
            window_s=round(seconds, 3),
            uptime_s=round(now - self._start, 3),
            workers=reading.workers,
            workers_ready=reading.workers_ready,
            worker_restarts=reading.restarts,
            connections=reading.connections,
            in_flight=reading.in_flight,
            waiting=reading.waiting,
            total=_row(_summed(reading, names), _summed(earlier, names), seconds, reading.bounds),
            releases=[ReleaseFigures(name=name, **row.model_dump()) for name, row in rows.items()],
            history=self._history(names),
        )

    def _history(self, names: Sequence[str]) -> list[float]:
        """Return the queries per second between consecutive readings."""
        points = [(when, _summed(reading, names).queries) for when, reading in self._readings]
        return [
            round(max(after - before, 0) / max(end - begin, 1e-3), 1)
            for (begin, before), (end, after) in pairwise(points)
        ]


def _summed(reading: Reading, names: Sequence[str]) -> Totals:
    total = Totals()
    for name in names:
        total = total.plus(reading.totals.get(name, Totals()))
    return total


def _row(now: Totals, earlier: Totals, seconds: float, bounds: Sequence[float]) -> FigureRow:
    """Return the figures between two readings."""
    new = now.minus(earlier)
    return FigureRow(
        queries_per_s=round(new.queries / seconds, 2),
        contexts_per_s=round(new.contexts / seconds, 2),
        failures_per_s=round(new.failures / seconds, 2),
        miss_rate=_ratio(min(new.misses, new.contexts), new.contexts),
        match_length=_ratio(new.matched, new.contexts),
        nodes=_ratio(new.nodes, new.contexts),
        p50_us=percentile(new.seconds, bounds, 0.50),
        p99_us=percentile(new.seconds, bounds, 0.99),
        queries=now.queries,
        contexts=now.contexts,
        misses=now.misses,
        failures=now.failures,
        swaps=now.swaps,
    )


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def percentile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return a percentile of a histogram, in microseconds; None if it is empty.

    Values are interpolated linearly inside a bucket; values above the last bound count as that bound.

    Args:
        counts: count of each bucket; the last is for values above all bounds.
        bounds: upper bounds in seconds, ascending.
        share: 0.5 for the median.

    Example:
        >>> percentile([0, 10, 0], [0.001, 0.003], 0.5)
        2000.0
    """
    rank = share * sum(counts)
    if not rank:
        return None
    lower = 0.0
    for count, upper in zip(counts, bounds, strict=False):
        if count and rank <= count:
            return round((lower + (upper - lower) * rank / count) * 1e6, 1)
        rank -= count
        lower = upper
    return round(lower * 1e6, 1)
