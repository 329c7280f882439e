"""The accepted lengths that the README quotes: `python -m benchmarks.accepted`.

Whole replay sets, both strategies, 64 nodes: chat outputs with a store of chats, code outputs with a store of
Python packages. A table first; the last line of stdout is one JSON document, also written to OUT/accepted.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.accepted --work ~/bench
"""

import argparse

from benchmarks.common import CHAT, CODE, RecordingSet, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import replay
from draftstore.stores.rest.store import BUDGET, STRATEGIES

QUICK_ROWS = 8
SETS = (
    (CHAT, RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")),
    (CODE, RecordingSet("humaneval.jsonl.zst", "CodeLlama-7b-Instruct-hf")),
)


def main() -> None:
    """Replay every set with every strategy and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accepted", description=__doc__)
    add_arguments(parser, code=True)
    args = parser.parse_args()
    results = []
    with open_workspace(args) as workspace:
        for source, recorded in SETS[:1] if args.quick else SETS:
            recordings = workspace.recordings(recorded)[: QUICK_ROWS if args.quick else None]
            store = workspace.store(source)
            for strategy in STRATEGIES:
                progress(f"{recorded.model} with {source.name}, {strategy}")
                figures = replay(store.drafter(strategy), recordings, budget=BUDGET).summary()
                results.append(
                    {"store": source.name, "model": recorded.model, "strategy": strategy} | figures
                )
    columns = ["store", "model", "strategy", "outputs", "M", "nodes", "p50 µs", "p99 µs"]
    table = [
        [each["store"], each["model"], each["strategy"], each["rows"], f"{each['accepted_length']:.3f}",
         each["nodes_mean"], each["lookup_us"]["p50"], each["lookup_us"]["p99"]]
        for each in results
    ]  # fmt: skip
    show_table(f"accepted length, {BUDGET} nodes", columns, table)
    finish(
        args.out, "accepted", describe_machine() | {"quick": args.quick, "budget": BUDGET, "sets": results}
    )


if __name__ == "__main__":
    main()
