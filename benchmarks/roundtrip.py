"""What a lookup costs more when it is served: `python -m benchmarks.roundtrip`.

A caller asks the service for one context and for 32, of REST and of CREST in LMDB. The unit is the least that this can
cost here: a bare echo of as many bytes, and the same drafts of the same contexts in the caller's process. All kinds of
calls take turns in random order, in many short rounds of a fresh process each; ratios are medians over the rounds,
because a shared machine drifts. Those of the lower quartiles are less disturbed by what else it does. Tables first; the
last line of stdout is one JSON document, also written to OUT/roundtrip.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.roundtrip --work ~/bench
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import add_arguments, draw_contexts, open_workspace
from benchmarks.echo import echo_server
from benchmarks.lookup_load import CONTEXTS, CREST, PROBE, REST, SERVICE_LOG
from benchmarks.lookup_tables import GOAL_RATIO
from benchmarks.measure import progress, run_fresh
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.served import RECORDED, prepare
from benchmarks.service import running
from draftstore.remote.release import CONTEXT_SIZE

ROUNDS = 9
SAMPLES = {(CREST, 1): 400, (CREST, 32): 60, (REST, 1): 300, (REST, 32): 20}
"""Batches of a round by store and size."""
QUICK_ROUNDS, QUICK_PART = 2, 0.2
SHARES = ("echo", "in process", "rested", "service", "client")


def main() -> None:
    """Measure and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roundtrip", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, help=f"of each store and size (default: {ROUNDS})")
    parser.add_argument("--rest", type=Path, help="a REST store (default: built in the work folder)")
    parser.add_argument("--crest", type=Path, help="a CREST store in LMDB; only together with --rest")
    args = parser.parse_args()
    if (args.rest is None) != (args.crest is None):
        parser.error("--rest and --crest belong together")
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    part = QUICK_PART if args.quick else 1.0
    with open_workspace(args) as workspace:
        if args.rest:
            stores = {CREST: args.crest.resolve(), REST: args.rest.resolve()}
            contexts = workspace.work / f"contexts-{CONTEXTS}.npy"
            np.save(contexts, draw_contexts(workspace.recordings(RECORDED), CONTEXTS, CONTEXT_SIZE))
        else:
            served = prepare(workspace, quick=args.quick, contexts=CONTEXTS, postgres=False)
            stores, contexts = {CREST: served.crest[0], REST: served.rest[0]}, served.contexts
        found = measure(stores, contexts, rounds, part, workspace.work / SERVICE_LOG)
    rows = [summarize(name, size, of_cell) for (name, size), of_cell in found.items()]
    show(rows)
    about = describe_machine(("uvloop", "lmdb")) | {"quick": args.quick, "load_average": os.getloadavg()[0]}
    finish(args.out, "roundtrip", about | {"rounds": rounds, "roundtrips": rows})


def measure(
    stores: Mapping[str, Path], contexts: Path, rounds: int, part: float, log: Path
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the rows of the probe for every round, by store and size of a batch.

    Raises:
        SystemExit: an answer differs from that of the store itself.
    """
    found: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in SAMPLES}
    with running(stores, log=log) as service, echo_server() as (echo, _):
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for (name, size), samples in SAMPLES.items():
                asked = {
                    "address": service.address, "echo": echo, "systems": [(name, str(stores[name]), "backoff")],
                    "batches": {str(size): max(10, int(samples * part))}, "contexts": str(contexts),
                    "cores": sorted(os.sched_getaffinity(0)),
                }  # fmt: skip
                (row,) = run_fresh(PROBE, asked)["rows"]
                if row["wrong"]:
                    raise SystemExit(f"{row['wrong']} answers differ from those of the store in this process")
                found[name, size].append(row)
    return found


def summarize(name: str, size: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median ratio of a cell, its range, and what its parts cost in units of echo and lookup together."""
    ratios = [row["ratio"] for row in rows]
    quiet = [{kind: figures["p25"] for kind, figures in row["us"].items()} for row in rows]
    parts = [_parts(us) for us in quiet]
    return {
        "store": name,
        "batch": size,
        "ratio": round(median(ratios), 2),
        "lowest": round(min(ratios), 2),
        "highest": round(max(ratios), 2),
        "quiet": round(median(us["client"] / (us["echo"] + us["in process"]) for us in quiet), 2),
        "unit_us": round(median(us["echo"] + us["in process"] for us in quiet)),
        "shares": {share: round(median(each[share] for each in parts), 2) for share in SHARES},
    }


def _parts(us: Mapping[str, float]) -> dict[str, float]:
    """Return what the parts of a round trip cost, where echo and lookup in this process together are 1.

    `rested` is the lookup in this process after a pause in place of the one before; `service` what bare frames take
    beyond echo and lookup, `client` what the client takes beyond bare frames.
    """
    least = us["echo"] + us["in process"]
    service = us["frames"] - us["echo"] - us["in process"]
    found = {
        "echo": us["echo"], "in process": us["in process"], "rested": us["rested"], "service": service,
        "client": us["client"] - us["frames"],
    }  # fmt: skip
    return {share: value / least for share, value in found.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Print the ratios, and where the time goes."""
    show_table(
        "round trip of the client / (echo + lookup in its own process), p50 and p25; unit and parts of p25",
        ["store", "batch", "ratio", "goal", "rounds from", "to", "p25", "unit µs", "echo", "in process",
         "after a pause", "service beyond", "client beyond"],
        [[row["store"], row["batch"], row["ratio"], GOAL_RATIO, row["lowest"], row["highest"], row["quiet"],
          row["unit_us"], *(row["shares"][share] for share in SHARES)] for row in rows],
    )  # fmt: skip


if __name__ == "__main__":
    main()
