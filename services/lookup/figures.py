"""Live figures of the service: what changed between two readings of its counters."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.lookup.metrics import SECONDS_BUCKETS, Metrics, Totals, read

WINDOW = 10
"""Readings over which rates are computed: few enough to show changes, enough for percentiles."""
HISTORY = 60
"""Readings in the curve of queries."""


class Figures:
    """Keeps the readings of the last minute: the time in seconds, and the counters by release."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the first reading; the clock gives monotonic seconds."""
        self._metrics = metrics
        self._clock = clock
        self._start = clock()
        self._readings: deque[tuple[float, dict[str, Totals]]] = deque(maxlen=HISTORY + 1)
        self.sample()

    def sample(self) -> None:
        """Read the counters; called once per second."""
        self._readings.append((self._clock(), self._metrics.totals()))

    def report(self, allowed: Callable[[str], bool]) -> dict[str, Any]:
        """Return the figures of the releases that the client may see, and their sum, as of the last reading."""
        readings = list(self._readings)
        (now, totals), (then, earlier) = readings[-1], readings[-WINDOW - 1 :][0]
        seconds = max(now - then, 1e-3)
        names = sorted(filter(allowed, totals))  # including "": requests that belong to no release

        def row(name: str, *names: str) -> dict[str, Any]:
            return _row(name, _add_up(totals, names), _add_up(earlier, names), seconds)

        queries = np.diff([_add_up(counted, names).queries for _, counted in readings])
        times = np.diff([at for at, _ in readings])
        return {
            "window_s": round(seconds, 3),
            "uptime_s": round(now - self._start, 3),
            "connections": read(self._metrics.connections),
            "waiting": read(self._metrics.waiting),
            "total": row("", *names),
            "releases": [row(name, name) for name in names if name],
            "history": (queries / np.maximum(times, 1e-3)).round(1).tolist(),
        }


def _add_up(totals: Mapping[str, Totals], names: Iterable[str]) -> Totals:
    rows = [Totals(), *(totals[name] for name in names if name in totals)]
    return Totals._make(map(sum, zip(*rows, strict=True)))


def _row(name: str, total: Totals, earlier: Totals, seconds: float) -> dict[str, Any]:
    """Return the figures of some releases, since the start and over the last seconds."""
    new = Totals._make(map(sub, total, earlier))

    def mean(amount: float) -> float | None:
        return round(amount / new.contexts, 4) if new.contexts else None

    return {
        "name": name,
        "queries_per_s": round(new.queries / seconds, 2),
        "miss_rate": mean(new.misses),
        "match_length": mean(new.matched_tokens),
        "nodes": mean(new.nodes),
        "p50_us": percentile(new.seconds, 0.50),
        "p99_us": percentile(new.seconds, 0.99),
        "queries": total.queries,
        "failures": int(total.failures),
        "swaps": int(total.swaps),
    }


def percentile(counts: NDArray[np.float64], share: float) -> float | None:
    """Return a percentile in microseconds, interpolated linearly inside a bucket; None without requests.

    `counts` are requests by duration, [bounds + 1]; those above all bounds count as the last bound.
    """
    below = np.cumsum([0, *counts])
    if not below[-1]:
        return None
    bounds = [0.0, *SECONDS_BUCKETS, SECONDS_BUCKETS[-1]]
    return round(float(np.interp(share * below[-1], below, bounds)) * 1e6, 1)
