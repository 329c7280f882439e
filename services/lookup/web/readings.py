"""Readings of the counters in shared memory, for the page and `/readyz`."""

from collections.abc import Collection

from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.totals import ReleaseTotals, WorkerFigures, add_up
from services.lookup.figures.words import SECONDS_BUCKETS
from services.lookup.web.live import Reading, Totals
from services.lookup.web.messages import ReadyReply


def read_figures(figures: SharedCounters) -> Reading:
    """Return the present counters of all workers."""
    workers = figures.snapshot()
    return Reading(
        totals={name: _totals(totals, workers) for name, totals in add_up(workers).items()},
        bounds=SECONDS_BUCKETS,
        workers=len(workers),
        workers_ready=sum(worker.answers for worker in workers),
        restarts=sum(worker.restarts for worker in workers),
        connections=sum(worker.connections for worker in workers),
        in_flight=sum(worker.in_flight for worker in workers),
        waiting=sum(worker.waiting for worker in workers),
    )


def read_readiness(figures: SharedCounters, wanted: Collection[str] = ()) -> ReadyReply:
    """Return True if drafts are served: at least one worker serves at least one release, and will go on to.

    A release that cannot be opened is reported, but does not make the service unready.
    """
    workers = [worker for worker in figures.snapshot() if worker.answers]
    ready = {name: totals.ready for name, totals in add_up(workers).items() if name and totals.ready}
    problems = [_problem(name, ready.get(name, 0), len(workers)) for name in sorted({*wanted, *ready})]
    if not workers:
        problems.insert(0, "no worker process is ready")
    elif not problems:
        problems.append("nothing is served yet: publish a release, or start the service with --store")
    if figures.stopping:
        problems.insert(0, "the service is about to stop")
    return ReadyReply(
        status="ready" if ready and not figures.stopping else "not ready",
        releases=sorted(name for name, count in ready.items() if count == len(workers)),
        problems=[problem for problem in problems if problem],
    )


def _problem(name: str, ready: int, workers: int) -> str:
    """Return what is wrong with a release; empty if every worker has it open."""
    if not ready:
        return f"the release {name!r} is not open"
    return "" if ready == workers else f"the release {name!r} is open in {ready} of {workers} workers"


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
