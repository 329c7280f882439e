"""How the constants of the `backoff` rule were chosen: `python -m benchmarks.smoothing`.

Every candidate replays the same tuning sets, none of which is reported elsewhere; what counts is the mean of
their accepted lengths. The grid varies one constant of the present rule at a time, and adds rules without the
distinct-token term (beta = 0) and REST's `longest`. The last line of stdout is one JSON document, also
written to OUT/smoothing.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.smoothing --work ~/bench --wheels ~/wheels
"""

import argparse
import dataclasses
from collections.abc import Sequence
from statistics import mean
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.common import CHAT, CODE, RecordingSet, Source, Workspace, add_arguments, open_workspace
from benchmarks.measure import percentiles, progress
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import Recording, replay
from draftstore.search.expand import Rule
from draftstore.stores.rest.store import BUDGET, DEFAULT_STRATEGY, STRATEGIES, RestDrafter, RestStore

FACTORS = {
    "alpha": (0.5, 0.75, 1.5, 2.0),
    "beta": (0.5, 0.75, 1.5, 2.0),
    "rows": (0.5, 2.0),
    "floor": (0.3, 3.0),
}
"""By what each constant of the present rule is multiplied."""
GAMMAS = (0.5, 1.0)
ALPHAS_ALONE = (3.0, 5.0, 10.0, 25.0)
PRESENT = "present"
QUICK_SOURCE = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
QUICK_ROWS = 4


@dataclasses.dataclass(frozen=True)
class TuningSet:
    """Recorded outputs, and the store they are replayed with.

    Attributes:
        name: for the table.
        source: of the store.
        parts: the recordings, each with the rows that are used.
    """

    name: str
    source: Source
    parts: tuple[tuple[RecordingSet, slice], ...]

    def read(self, workspace: Workspace, limit: int | None) -> list[Recording]:
        """Read the recordings, `limit` of each part at most."""
        return [row for recorded, rows in self.parts for row in workspace.recordings(recorded)[rows][:limit]]


TUNING_SETS = (
    TuningSet("spec_bench", CHAT, ((RecordingSet("spec_bench.jsonl.zst", "vicuna-7b-v1.3"), slice(100)),)),
    TuningSet("sharegpt", CHAT, ((RecordingSet("sharegpt.jsonl.zst"), slice(None, None, 5)),)),
    TuningSet("code_alpaca", CHAT, ((RecordingSet("code_alpaca.jsonl.zst"), slice(None)),)),
    TuningSet(
        "mbpp",
        CODE,
        (
            (RecordingSet("mbpp.jsonl.zst", "CodeLlama-34b-Instruct-hf"), slice(120)),
            (RecordingSet("mbpp.jsonl.zst", "gpt-3.5-turbo-0613"), slice(100)),
        ),
    ),
)


def candidates() -> dict[str, Rule]:
    """Return the rules to try, by what sets them apart."""
    present = STRATEGIES[DEFAULT_STRATEGY]
    rules = {PRESENT: present}
    for constant, factors in FACTORS.items():
        kind = type(getattr(present, constant))
        values = [kind(getattr(present, constant) * factor) for factor in factors]
        rules |= {f"{constant} {value:g}": present._replace(**{constant: value}) for value in values}
    rules |= {f"gamma {gamma:g}": present._replace(gamma=gamma) for gamma in GAMMAS}
    rules |= {f"alpha {alpha:g}, beta 0": present._replace(alpha=alpha, beta=0.0) for alpha in ALPHAS_ALONE}
    return rules | {"longest": STRATEGIES["longest"]}


def evaluate(rule: Rule, sets: Sequence[tuple[str, RestStore, list[Recording]]]) -> dict[str, Any]:
    """Replay every tuning set with one rule."""
    figures: dict[str, Any] = {"rule": rule._asdict(), "accepted_length": {}}
    lookups: list[int] = []
    for name, store, recordings in sets:
        drafter = RestDrafter(store.index, rule)
        drafter.warm_up()
        result = replay(drafter, recordings, budget=BUDGET)
        figures["accepted_length"][name] = round(result.accepted_length, 4)
        lookups += result.lookup_ns
    figures["mean"] = round(mean(figures["accepted_length"].values()), 4)
    figures["lookup_us"] = percentiles(np.array(lookups) / 1000)
    return figures


def show(results: dict[str, dict[str, Any]], rows: dict[str, int]) -> None:
    """Print the candidates, best first, the present rule marked."""
    best_first = sorted(results, key=lambda label: -results[label]["mean"])
    table = []
    for label in best_first:
        figures = results[label]
        rule = [f"{figures['rule'][name]:g}" for name in ("alpha", "beta", "gamma", "rows", "floor")]
        marked = f"{label} <- chosen" if label == PRESENT else label
        lengths = [figures["accepted_length"][name] for name in rows]
        table.append([marked, *rule, *lengths, f"{figures['mean']:.4f}", figures["lookup_us"]["p50"]])
    named = [f"{name} ({count})" for name, count in rows.items()]
    columns = ["candidate", "alpha", "beta", "gamma", "rows", "floor", *named, "mean M", "p50 µs"]
    show_table(f"accepted length on the tuning sets (outputs), {BUDGET} nodes", columns, table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoothing", description=__doc__)
    add_arguments(parser, code=True)
    return parser.parse_args()


def main() -> None:
    """Evaluate the grid and finish with the JSON document."""
    args = parse_arguments()
    begin = perf_counter()
    document = describe_machine() | {"quick": args.quick, "budget": BUDGET, "present": PRESENT}
    with open_workspace(args) as workspace:
        chosen = TUNING_SETS[:-1] if args.quick else TUNING_SETS
        limit = QUICK_ROWS if args.quick else None
        sources = dict.fromkeys(each.source for each in chosen)
        stores = {source: workspace.store(QUICK_SOURCE if args.quick else source) for source in sources}
        sets = [(each.name, stores[each.source], each.read(workspace, limit)) for each in chosen]
        results = {}
        for label, rule in candidates().items():
            progress(f"candidate {label}")
            results[label] = evaluate(rule, sets)
        rows = {name: len(recordings) for name, _, recordings in sets}
        show(results, rows)
        best = max(results, key=lambda label: results[label]["mean"])
        document |= {
            "best": best,
            "rows": rows,
            "candidates": results,
            "seconds": round(perf_counter() - begin),
        }
        finish(args.out, "smoothing", document)


if __name__ == "__main__":
    main()
