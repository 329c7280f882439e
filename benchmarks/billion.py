"""A store of 10^9 tokens with segments of full size: `python -m benchmarks.billion --store DIR`.

There is not that much text here, so a full segment of a store is repeated with other token ids, but for the most common
ones: n-grams then differ from copy to copy, as those of further texts do, and the most common tokens, which bound the
memory, keep their share. Laying out, sorting and hashing are those of a build; tokenizing is left out. Then drafts are
timed, of the whole store and of one of its partitions, for places of recorded outputs.

Tables first; the last line of stdout is one JSON document, also written to OUT/billion.json. Needs 7 bytes of disk for
each token.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.billion --work ~/bench --store ~/bench/stores/growth_all
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import add_arguments, draw_contexts, open_workspace
from benchmarks.growthprobe import watched
from benchmarks.measure import percentiles, progress, run_fresh, time_calls, undisturbed
from benchmarks.replays import REPLAYS
from benchmarks.report import describe_machine, finish, show_table
from draftstore.stores.partition import Partition
from draftstore.stores.rest.store import MAX_MATCH, RestStore

TOKENS, QUICK_TOKENS = 1_000_000_000, 1_000_000
CONTEXTS = 3200
REPLAYED = "AlpacaEval: Vicuna-7B-v1.5"


def ask(store: RestStore, contexts: NDArray[np.int32]) -> dict[str, float]:
    """Return the times of drafts in microseconds, on one core, with the pages that they read in memory."""
    drafter = store.drafter("backoff")
    drafter.warm_up()
    calls = [drafter.session(context[context >= 0]).propose for context in contexts]
    for call in calls:
        call()
    with undisturbed():
        return percentiles(time_calls(calls))


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, ask, print tables, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.billion", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--store", type=Path, required=True, help="a REST store whose first segment is repeated"
    )
    parser.add_argument("--tokens", type=int, help=f"at least so many (default: {TOKENS:,})")
    args = parser.parse_args(arguments)
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    with open_workspace(args) as workspace:
        out = workspace.work / "stores" / "billion"
        progress(f"{tokens:,} tokens")
        asked = {"what": "repeat", "store": str(args.store), "out": str(out), "tokens": tokens}
        with watched() as peaks:
            seconds = run_fresh("benchmarks.growthprobe", asked)
        store = RestStore.open(out)
        segments = len(store.index.segments)
        contexts = draw_contexts(REPLAYS[REPLAYED].read(workspace, 100), CONTEXTS, MAX_MATCH)
        drafts = {"whole": ask(store, contexts)}
        if segments > 1:
            drafts["a partition"] = ask(store.take(Partition(1, segments))[0], contexts)
        figures: dict[str, Any] = {
            "tokens": len(store.index.tokens),
            "segments": segments,
            "bytes": sum(path.stat().st_size for path in out.glob("*.bin")),
            "seconds": seconds,
            "draft_us": drafts,
            **peaks,
        }
    show_table("seconds", list(seconds), [list(seconds.values())])
    times = [[name, each["p50"], each["p99"]] for name, each in drafts.items()]
    show_table("µs of a draft", ["store", "p50", "p99"], times)
    finish(args.out, "billion", describe_machine() | {"quick": args.quick} | figures)


if __name__ == "__main__":
    main()
