"""What the lookup service costs, and what it bears: `python -m benchmarks.lookup_load`.

1. Round trips of one caller, in one run and in turn: `draftstore.remote.client`, bare frames, an echo of the same
sizes over
   the same kind of socket, and the same drafts in this process.
2. Peak throughput over many connections.
3. Latencies at 50 and 80 % of the peak.
4. The same while a release moves in a real catalogue.

The generator compares every answer with that of the build that it names. Tables first; the last line of stdout is one
JSON document, also written to OUT/lookup_load.json. PostgreSQL is $DRAFTSTORE_DATABASE_URL, else an embedded server in
the work folder.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.lookup_load --work ~/bench
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import STRATEGY_NAMES, add_arguments, open_workspace
from benchmarks.echo import echo_plan, echo_server
from benchmarks.loadgen import Load
from benchmarks.loadplan import Question, make_plan
from benchmarks.loadrun import Mover, RunningLoad, run_load
from benchmarks.lookup_tables import show_goals, show_loads, show_roundtrips, show_swaps
from benchmarks.measure import progress, run_fresh
from benchmarks.report import describe_machine, finish, without
from benchmarks.served import Served, prepare
from benchmarks.service import Service, cpu_seconds, pin, running
from schema.database import close, is_embedded
from schema.home import HOME_VARIABLE

PARTS = ("roundtrips", "peak", "share", "swap")
CONTEXTS = 16_384
CREST, POSTGRES, REST = "crest-lmdb", "crest-postgres", "rest"
PROBE = "benchmarks.roundtripprobe"
SAMPLES = {1: 4000, 8: 2000, 32: 1000, 64: 500}
"""Batches that are asked, by their size."""
CONNECTIONS = (1, 4, 16, 64)
BATCHES = (1, 8, 64)
SHARES = (0.5, 0.8)
SHARE_CONNECTIONS = 64
FRAMES = 512
"""Different requests of one kind."""
RELEASE = "bench-moving"
SERVICE_LOG = "lookup-service.log"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is done.

    Attributes:
        seconds: of each load.
        samples: batches of each size for the round trips.
        connections: numbers of them for the peak.
        workers: numbers of them.
        swaps: moves of the release.
    """

    seconds: float
    samples: Mapping[int, int]
    connections: Sequence[int]
    workers: Sequence[int]
    swaps: int


DETAILS = {"begin", "builds", "by_kind", "failed_at", "lost_at", "mean", "moves", "refused", "since_sent_us"}
"""What the file of results leaves out."""
FULL = Scale(3.0, SAMPLES, CONNECTIONS, (1, 2), 8)
QUICK = Scale(0.5, {1: 400, 8: 150, 32: 60, 64: 40}, (1, 16), (1,), 2)


def main() -> None:
    """Run all parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup_load", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--part", choices=PARTS, action="append", help="only these (default: all)")
    parser.add_argument(
        "--store", choices=(CREST, POSTGRES, REST), action="append", help="only these (default: all)"
    )
    parser.add_argument("--seconds", type=float, help="of each load (default: 3)")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    scale = dataclasses.replace(scale, seconds=args.seconds or scale.seconds)
    parts, names = args.part or PARTS, args.store or (CREST, POSTGRES, REST)
    with open_workspace(args) as workspace:
        os.environ.setdefault(HOME_VARIABLE, str(workspace.work / "home"))
        served = prepare(workspace, quick=args.quick, contexts=CONTEXTS, postgres=POSTGRES in names)
        stores = {name: path for name, path in _stores(served).items() if name in names}
        figures: dict[str, Any] = {"load_average": os.getloadavg()[0], "embedded": is_embedded()}
        if "roundtrips" in parts:
            figures["roundtrips"] = run_roundtrips(stores, served, scale, workspace.work)
        if "peak" in parts or "share" in parts:
            figures["loads"] = list(run_loads(stores, served, scale, workspace.work, share="share" in parts))
            show_loads(figures["loads"])
            figures["loads"] = [row | {"peak": highest(row["peak"])} for row in figures["loads"]]
        if "swap" in parts:
            figures["swap"] = list(run_swaps(served, scale, workspace.work))
            show_swaps(figures["swap"])
        close()
    about = describe_machine(("uvloop", "lmdb", "psycopg")) | {"quick": args.quick}
    finish(args.out, "lookup_load", about | without(figures, DETAILS))


def highest(peaks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the load with the most answers a second."""
    return max(peaks, key=lambda peak: float(peak["answers_per_second"]))


def _stores(served: Served) -> dict[str, Path]:
    """Return what is served by name, fastest first."""
    found = {CREST: served.crest[0], REST: served.rest[0]}
    return found if served.crest_postgres is None else found | {POSTGRES: served.crest_postgres}


def run_roundtrips(stores: Mapping[str, Path], served: Served, scale: Scale, work: Path) -> dict[str, Any]:
    """Measure round trips for each of `PLACEMENTS`.

    Where a server runs decides more than what it does: a call to another core wakes that up first. The system may
    place the echo and the service differently, so that only the last two placements compare like with like.
    """
    systems = [(name, str(path), strategy) for name, path in stores.items() for strategy in STRATEGY_NAMES]
    found = {}
    with running(stores, log=work / SERVICE_LOG) as service, echo_server() as (echo, echo_pid):
        cores = sorted(os.sched_getaffinity(0))
        asked = {
            "address": service.address, "echo": echo, "systems": systems, "batches": dict(scale.samples),
            "contexts": str(served.contexts),
        }  # fmt: skip
        for placement, (callers, servers) in {
            "free": (cores, cores), "apart": (cores[-1:], cores[:1]), "together": (cores[:1], cores[:1]),
        }.items():  # fmt: skip
            progress(f"round trips, {placement}")
            for pid in (*service.workers(), echo_pid):
                pin(pid, servers)
            found[placement] = run_fresh(PROBE, asked | {"cores": callers})["rows"]
            show_roundtrips(placement, found[placement])
    show_goals(CREST, found)
    wrong = sum(row["wrong"] for rows in found.values() for row in rows)
    if wrong:
        raise SystemExit(f"{wrong} answers differ from those of the store in this process")
    return found


def run_loads(
    stores: Mapping[str, Path], served: Served, scale: Scale, work: Path, *, share: bool
) -> Iterator[dict[str, Any]]:
    """Find the peak of each store, batch size and number of workers; then load it in part if `share` says so."""
    plans = {}
    for name, path in stores.items():
        for batch in BATCHES:
            progress(f"answers of {name} for batches of {batch}")
            plan = make_plan([Question(name, "backoff", served.draw(batch, FRAMES))], {name: [path]})
            plans[name, batch] = work / f"plan-{name}-{batch}.npz"
            plan.save(plans[name, batch])
            echo_plan(plan).save(_echo_file(plans[name, batch]))
    for workers in scale.workers:
        with running(stores, workers=workers, log=work / SERVICE_LOG) as service, echo_server() as (echo, _):
            for (name, batch), plan_file in plans.items():
                progress(f"{name}, batches of {batch}, {workers} workers")
                load = Load(service.address, str(plan_file), scale.seconds)
                peaks = [
                    _loaded(service, dataclasses.replace(load, connections=count))
                    for count in scale.connections
                ]
                row = {"store": name, "batch": batch, "workers": workers, "peak": peaks}
                if share:
                    best = highest(peaks)
                    rates = {part: part * best["answers_per_second"] for part in SHARES}
                    parted = {
                        str(part): dataclasses.replace(load, connections=SHARE_CONNECTIONS, rate=rate)
                        for part, rate in rates.items()
                    }
                    row["share"] = {part: _loaded(service, each) for part, each in parted.items()}
                    row["echo"] = {
                        part: run_load(
                            dataclasses.replace(each, address=echo, plan=str(_echo_file(plan_file)))
                        )
                        for part, each in parted.items()
                    }
                yield row


def _echo_file(plan_file: Path) -> Path:
    """Return where the plan for the echo is."""
    return plan_file.with_suffix(".echo.npz")


def _loaded(service: Service, load: Load) -> dict[str, Any]:
    """Run a load, and add what it cost the workers: processor time for each answer, and the part of the busiest."""
    workers = service.workers()
    before = np.array([cpu_seconds(pid) for pid in workers])
    figures = run_load(load)
    used = np.array([cpu_seconds(pid) for pid in workers]) - before
    answers = figures["answers_per_second"] * (load.seconds + load.warm_up)
    figures["worker_cpu_us"] = round(1e6 * float(used.sum()) / max(1.0, answers), 1)
    figures["busiest_worker"] = round(float(used.max() / max(used.sum(), 1e-9)), 2)
    return figures


def run_swaps(served: Served, scale: Scale, work: Path) -> Iterator[dict[str, Any]]:
    """Load releases to half of their peak, first in peace, then while each moves between two builds again and again."""
    for name, builds in ((CREST, served.crest), (REST, served.rest)):
        progress(f"swaps of {name}")
        plan_file = work / f"plan-swap-{name}.npz"
        question = Question(RELEASE, "backoff", served.draw(1, FRAMES))
        make_plan([question], {RELEASE: builds}).save(plan_file)
        with Mover(RELEASE, builds) as mover:
            for workers in scale.workers:
                with running(releases=[RELEASE], workers=workers, log=work / SERVICE_LOG) as service:
                    load = Load(service.address, str(plan_file), scale.seconds, connections=16)
                    peak = _loaded(service, load)
                    half = dataclasses.replace(load, rate=0.5 * peak["answers_per_second"])
                    row = {"store": name, "workers": workers, "peace": _loaded(service, half)}
                    yield row | _during_swaps(mover, half, scale)


def _during_swaps(mover: Mover, load: Load, scale: Scale) -> dict[str, Any]:
    """Run a load while a release moves; as many moves as `scale` says, in equal distances."""
    load = dataclasses.replace(load, seconds=scale.seconds + scale.swaps)
    under_load = RunningLoad(load)
    moves = []
    for _ in range(scale.swaps):
        time.sleep(load.seconds / (scale.swaps + 1))
        moves.append(mover.move())
    figures = under_load.result()
    begin = figures["begin"]
    return {"moves": [move | {"at": round(move["at"] - begin, 3)} for move in moves], "moving": figures}


if __name__ == "__main__":
    main()
