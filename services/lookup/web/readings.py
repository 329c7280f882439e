"""Readings of the counters in shared memory, for the page and `/readyz`."""

from collections.abc import Collection

from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.totals import ReleaseTotals, WorkerFigures, WorkerState, add_up
from services.lookup.figures.words import SECONDS_BUCKETS
from services.lookup.web.live import Reading, Totals
from services.lookup.web.messages import ReadyReply

SILENT = 10.0
"""Seconds without a heartbeat after which a worker counts as hanging."""


def read_figures(figures: SharedCounters) -> Reading:
    """Return the present counters of all workers."""
    workers = figures.snapshot()
    return Reading(
        totals={name: _totals(totals, workers) for name, totals in add_up(workers).items()},
        bounds=SECONDS_BUCKETS,
        workers=len(workers),
        workers_ready=sum(map(_answers, workers)),
        restarts=sum(worker.restarts for worker in workers),
        connections=sum(worker.connections for worker in workers),
        in_flight=sum(worker.in_flight for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
    )


def read_readiness(figures: SharedCounters, wanted: Collection[str] = ()) -> ReadyReply:
    """Tell whether drafts are served: at least one worker serves at least one release.

    A release that cannot be opened is reported, but does not make the service unready.

    Args:
        figures: counters of the workers.
        wanted: names that should be served.
    """
    workers = [worker for worker in figures.snapshot() if _answers(worker)]
    ready = {name: totals.ready for name, totals in add_up(workers).items() if name}
    served = sorted(name for name, count in ready.items() if count == len(workers))
    problems = [f"the release {name!r} is not open" for name in sorted(set(wanted) - set(served))]
    if not workers:
        problems.insert(0, "no worker process is ready")
    elif not served and not problems:
        problems.insert(0, "nothing is served yet: publish a release, or start the service with --store")
    return ReadyReply(status="ready" if served else "not ready", releases=served, problems=problems)


def _answers(worker: WorkerFigures) -> bool:
    return worker.state == WorkerState.READY and worker.silence < SILENT


def _totals(totals: ReleaseTotals, workers: Collection[WorkerFigures]) -> Totals:
    """Return the sums of a release; a swap that every worker makes counts once."""
    swaps = [worker.releases[totals.name].swaps for worker in workers if totals.name in worker.releases]
    return Totals(
        queries=totals.queries,
        contexts=totals.contexts,
        misses=totals.misses,
        nodes=totals.nodes,
        matched=totals.matched,
        failures=sum(totals.failures),
        swaps=max(swaps, default=0),
        seconds=totals.lapses,
    )
