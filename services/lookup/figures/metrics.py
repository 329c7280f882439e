"""The counters of the service as Prometheus metrics."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import draftstore
from draftstore.remote.wire import Status
from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.totals import ReleaseTotals, WorkerFigures, add_up
from services.lookup.figures.words import BATCH_BUCKETS, MATCH_BUCKETS, SECONDS_BUCKETS

RELEASE_COUNTERS = {
    "queries": "Requests that were answered with drafts.",
    "contexts": "Contexts that were answered with drafts, empty ones included.",
    "misses": "Contexts that got an empty draft.",
    "nodes": "Nodes of all drafts.",
    "request_bytes": "Bytes of requests.",
    "answer_bytes": "Bytes of answers.",
    "swaps": "Times that another build took over under the name, in one worker each.",
    "unopened": "Failed attempts to open a store under the name, in one worker each.",
}
RENAMED = {"waiting": "waiting_contexts", "unopened": "open_failures"}
"""Names of metrics that say more than those of the figures."""
WORKER_GAUGES = {
    "in_flight": "Requests that are being answered.",
    "connections": "Connections that are open.",
    "waiting": "Contexts that wait to be looked up.",
}


def metrics_text(figures: SharedCounters) -> bytes:
    """Return all metrics in the text format of Prometheus, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FiguresCollector(figures))
    return generate_latest(registry)


class FiguresCollector(Collector):
    """Reads shared memory whenever metrics are collected."""

    def __init__(self, figures: SharedCounters) -> None:
        """Report on the processes that count into `figures`."""
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        workers = self._figures.snapshot()
        releases = list(add_up(workers).values())
        yield from _release_counters(releases)
        yield from _release_histograms(releases)
        yield from _release_states(releases, workers)
        yield from _worker_metrics(workers)
        yield from _catalogue_metrics(workers)
        yield _resident_memory(workers)
        info = InfoMetricFamily("draftstore_service", "The version that runs.")
        info.add_metric([], {"version": draftstore.__version__})
        yield info


def _release_counters(releases: Iterable[ReleaseTotals]) -> Iterator[Metric]:
    """Yield the counters of every release; the name is empty for requests that name no served release."""
    for field, text in RELEASE_COUNTERS.items():
        name = f"draftstore_{RENAMED.get(field, field)}"
        family = CounterMetricFamily(name, text, labels=["release"])
        for totals in releases:
            family.add_metric([totals.name], getattr(totals, field))
        yield family
    failures = CounterMetricFamily(
        "draftstore_failures",
        "Requests that failed, by the status of the answer.",
        labels=["release", "status"],
    )
    for totals in releases:
        for status in Status:
            if status != Status.OK:
                failures.add_metric([totals.name, status.name.lower()], totals.failures[status])
    yield failures


def _release_histograms(releases: Sequence[ReleaseTotals]) -> Iterator[Metric]:
    """Yield the histograms of requests and contexts."""
    batches = HistogramMetricFamily("draftstore_batch_size", "Contexts of a request.", labels=["release"])
    matches = HistogramMetricFamily(
        "draftstore_match_length", "Tokens of a context's longest match.", labels=["release"]
    )
    lapses = HistogramMetricFamily(
        "draftstore_lookup_seconds", "From the arrival of a whole request to its answer.", labels=["release"]
    )
    for totals in releases:
        label = [totals.name]
        batches.add_metric(label, _buckets(BATCH_BUCKETS, totals.batches), totals.contexts)
        matches.add_metric(label, _buckets(MATCH_BUCKETS, totals.matches), totals.matched)
        lapses.add_metric(label, _buckets(SECONDS_BUCKETS, totals.lapses), totals.seconds)
    yield from (batches, matches, lapses)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram in Prometheus' form: cumulative counts by upper bound."""
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


def _release_states(releases: Iterable[ReleaseTotals], workers: Sequence[WorkerFigures]) -> Iterator[Metric]:
    """Yield the state of every release; a worker that shows no sign of life does not serve."""
    served = add_up(worker for worker in workers if worker.answers)
    ready = GaugeMetricFamily(
        "draftstore_ready", "1 where every worker answers for the release.", labels=["release"]
    )
    info = InfoMetricFamily("draftstore_release", "What is served under the name.", labels=["release"])
    for totals in releases:
        if not totals.name:
            continue
        count = served[totals.name].ready if totals.name in served else 0
        ready.add_metric([totals.name], float(count == len(workers)))
        if totals.ready:
            info.add_metric([totals.name], totals.labels._asdict())
    yield from (ready, info)


def _worker_metrics(workers: Iterable[WorkerFigures]) -> Iterator[Metric]:
    """Yield the metrics of every worker process."""
    up = GaugeMetricFamily("draftstore_worker_up", "1 where the worker answers.", labels=["worker"])
    gauges = {
        field: GaugeMetricFamily(f"draftstore_{RENAMED.get(field, field)}", text, labels=["worker"])
        for field, text in WORKER_GAUGES.items()
    }
    restarts = CounterMetricFamily(
        "draftstore_worker_restarts", "Times that the worker was started again.", labels=["worker"]
    )
    read = CounterMetricFamily(
        "draftstore_storage_read_bytes",
        "Bytes that were read from storage for the worker.",
        labels=["worker"],
    )
    for worker in workers:
        label = [str(worker.slot)]
        up.add_metric(label, float(worker.answers))
        for field, family in gauges.items():
            family.add_metric(label, getattr(worker, field))
        restarts.add_metric(label, worker.restarts)
        read.add_metric(label, worker.storage_read)
    yield from (up, *gauges.values(), restarts, read)


def _catalogue_metrics(workers: Iterable[WorkerFigures]) -> Iterator[Metric]:
    """Yield how far each worker follows the catalogue; nothing where directories alone are served."""
    up = GaugeMetricFamily("draftstore_catalogue_up", "1 where the catalogue can be read.", labels=["worker"])
    age = GaugeMetricFamily(
        "draftstore_catalogue_age_seconds",
        "Seconds since the worker, or the one that kept what it serves, last read the catalogue.",
        labels=["worker"],
    )
    for worker in workers:
        label = [str(worker.slot)]
        if worker.catalogue_age is not None or worker.catalogue_away:
            up.add_metric(label, float(not worker.catalogue_away))
        if worker.catalogue_age is not None:
            age.add_metric(label, worker.catalogue_age)
    yield from (up, age)


def _resident_memory(workers: Iterable[WorkerFigures]) -> Metric:
    """Return the memory of all processes: anonymous pages, and file pages, which they share."""
    family = GaugeMetricFamily(
        "draftstore_resident_memory_bytes",
        "Memory of a process: anonymous, or pages of files that are mapped, shared with the other processes.",
        labels=["process", "kind"],
    )
    processes = {f"worker-{worker.slot}": worker.pid for worker in workers if worker.pid}
    processes |= {"web": os.getpid()}
    for name, pid in processes.items():
        for kind, size in resident_bytes(pid).items():
            family.add_metric([name, kind], size)
    return family


def resident_bytes(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process by kind, `anonymous` and `file`; empty if it has ended."""
    found = {}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            for field, kind in (("RssAnon:", "anonymous"), ("RssFile:", "file")):
                if line.startswith(field):
                    found[kind] = int(line.split()[1]) * 1024
    return found
