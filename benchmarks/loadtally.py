"""What came of a load: latencies, and everything that was not answered as it should be."""

import time
from array import array
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

LATE_MS = (2, 5, 10, 50)
"""Latencies are counted above each of these; the first is the deadline of `draftstore.remote.client`."""


class Tally:
    """What came of the requests."""

    def __init__(self) -> None:
        self.due, self.latency, self.since_sent, self.kind = array("d"), array("d"), array("d"), array("B")
        self.problems: Counter[str] = Counter()
        self.builds: Counter[int] = Counter()
        self.lost: list[float] = []
        """When a connection broke with a request under way."""
        self.failed: list[tuple[float, str]] = []
        """When each problem came up that is no lost connection, and what it was; the first 1,000."""
        self.refused = 0
        """Attempts to connect that failed."""

    def problem(self, what: str) -> None:
        """Count a request that was not answered as it should be."""
        self.problems[what] += 1
        if what == "lost":
            self.lost.append(time.monotonic())
        elif len(self.failed) < 1000:
            self.failed.append((time.monotonic(), what))


def latencies(seconds: NDArray[np.float64]) -> dict[str, Any]:
    """Summarize durations in seconds as microseconds, with how many were late."""
    if not len(seconds):
        return {"samples": 0}
    micros = seconds * 1e6
    p50, p99, p999 = np.percentile(micros, [50, 99, 99.9])
    return {
        "p50": round(p50, 1),
        "p99": round(p99, 1),
        "p99.9": round(p999, 1),
        "mean": round(float(micros.mean()), 1),
        "max": round(float(micros.max()), 1),
        "samples": len(micros),
        "late": {f"{limit} ms": int((micros > limit * 1000).sum()) for limit in LATE_MS},
    }
