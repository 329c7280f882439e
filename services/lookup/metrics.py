"""The counters of the service, for Prometheus, and the live figures of the page: what changed in the last seconds.

Each is increased by one thread only, those of requests by the event loop. As objects of prometheus_client they would
take 5 µs per request, a tenth of a lookup; instead, it collects them when it is scraped.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

import draftstore
from draftstore.remote.wire import Status
from draftstore.trees.batch import DraftBatch

SECONDS_BUCKETS = (
    25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3,
)  # fmt: skip
_COUNTERS = {
    "contexts": "Contexts that were answered with drafts, empty ones included.",
    "misses": "Contexts that got an empty draft.",
    "nodes": "Nodes of all drafts.",
    "matched_tokens": "Tokens of the longest match, summed over contexts.",
    "request_bytes": "Bytes of requests that were answered with drafts.",
    "answer_bytes": "Bytes of answers with drafts.",
    "appended_tokens": "Tokens that decoders appended to the live store.",
    "unlogged_documents": "Documents of the live store that could not be logged: a restart loses them.",
    "swaps": "Swaps to another build.",
    "open_failures": "Failed attempts to open a store.",
}
WINDOW = 10
"""Readings over which rates are computed: few enough to show changes, enough for percentiles."""
HISTORY = 60
"""Readings in the curve of queries."""
_OF_RELEASE, _BY_STATUS = ["release"], ["release", "status"]
NO_RELEASE = ""
"""Label of requests for a name that is not served: each name would occupy a label for good."""


class Totals(NamedTuple):
    """The counters of one release since the start; `seconds` are requests by duration, float64 [bounds + 1]."""

    contexts: float = 0
    misses: float = 0
    nodes: float = 0
    matched_tokens: float = 0
    swaps: float = 0
    failures: float = 0
    seconds: NDArray[np.float64] = np.zeros(len(SECONDS_BUCKETS) + 1)

    @property
    def queries(self) -> int:
        """Number of requests answered with drafts."""
        return int(self.seconds.sum())


class ReleaseMetrics:
    """The counters of one release; of `counts`, `swaps` and `open_failures` are increased elsewhere."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self.failures = dict.fromkeys((status for status in Status if status), 0)
        self.seconds = [0] * (len(SECONDS_BUCKETS) + 1)
        self.sum_of_seconds = 0.0

    def answer(self, drafts: DraftBatch, request_bytes: int, answer_bytes: int, seconds: float) -> None:
        """Count an answered request; `seconds` is from its arrival to its answer."""
        counts, sizes = self.counts, drafts.sizes.tolist()
        counts["contexts"] += len(sizes)
        counts["misses"] += sizes.count(0)
        counts["nodes"] += sum(sizes)
        counts["matched_tokens"] += sum(drafts.match_lengths.tolist())
        counts["request_bytes"] += request_bytes
        counts["answer_bytes"] += answer_bytes
        self.seconds[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.sum_of_seconds += seconds

    def fail(self, status: Status) -> None:
        """Count a request that failed."""
        self.failures[status] += 1

    def totals(self) -> Totals:
        """Return the counters since the start."""
        counts = {key: count for key, count in self.counts.items() if key in Totals._fields}
        return Totals(**counts, failures=sum(self.failures.values()), seconds=np.array(self.seconds, float))


class Metrics:
    """The counters of a service."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._releases: dict[str, ReleaseMetrics] = {}
        ProcessCollector(registry=registry)
        registry.register(self)
        self.connections = self._gauge("connections", "Open connections.")
        self.waiting = self._gauge("waiting_contexts", "Contexts waiting for a thread or in one.")
        self._ready = self._gauge("ready", "1 if the release is served, else 0.", _OF_RELEASE)
        self._builds = Info("draftstore_release", "The served build.", _OF_RELEASE, registry=registry)
        service = Info("draftstore_service", "The running version.", registry=registry)
        service.info({"version": draftstore.__version__})
        self.nothing = self.of(NO_RELEASE)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"draftstore_{name}", text, labels, registry=self._registry)

    def of(self, name: str) -> ReleaseMetrics:
        """Return the counters of a release that is or was served."""
        if (found := self._releases.get(name)) is None:  # two threads get the same object
            found = self._releases.setdefault(name, ReleaseMetrics())
        return found

    def show(self, served: Mapping[str, dict[str, str]], unopened: Iterable[str]) -> None:
        """Show which releases are served, by the labels of their builds, and which should be."""
        self._ready.clear()
        self._builds.clear()
        for name, labels in served.items():
            self.of(name)
            self._ready.labels(name).set(1)
            self._builds.labels(name).info(labels)
        for name in unopened:
            self._ready.labels(name).set(0)

    def watch_catalogue(self, up: Callable[[], float], age: Callable[[], float]) -> None:
        """Show whether the catalogue can be read, and the seconds since it was, NaN if it never was."""
        self._gauge("catalogue_up", "1 if the catalogue can be read, else 0.").set_function(up)
        text = "Seconds since the catalogue was last read."
        self._gauge("catalogue_age_seconds", text).set_function(age)

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of all releases; called by the registry."""
        releases = list(self._releases.items())
        for key, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"draftstore_{key}", text, labels=_OF_RELEASE)
            for name, release in releases:
                counter.add_metric([name], release.counts[key])
            yield counter
        failures = CounterMetricFamily("draftstore_failures", "Failed requests.", labels=_BY_STATUS)
        text = "From the arrival of a whole request to its answer."
        seconds = HistogramMetricFamily("draftstore_lookup_seconds", text, labels=_OF_RELEASE)
        for name, release in releases:
            for status, count in release.failures.items():
                failures.add_metric([name, status.name.lower()], count)
            below = zip([*map(str, SECONDS_BUCKETS), "+Inf"], accumulate(release.seconds), strict=True)
            seconds.add_metric([name], list(below), release.sum_of_seconds)
        yield from (failures, seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def totals(self) -> dict[str, Totals]:
        """Return the counters by release; the empty name is for requests that belong to none."""
        return {name: release.totals() for name, release in list(self._releases.items())}


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


def read(gauge: Gauge) -> int:
    """Return the value of a gauge without labels."""
    [family] = gauge.collect()
    return int(family.samples[0].value)
