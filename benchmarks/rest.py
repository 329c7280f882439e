"""The REST store measured: `python -m benchmarks.rest`.

Two parts: the cost of a store by size, and other libraries over the same texts and contexts. Tables first; the last
line of stdout is one JSON document; each part is also written to OUT/rest_PART.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.rest --work ~/bench --parts scale
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, add_arguments, open_workspace
from benchmarks.comparison import run_comparison
from benchmarks.peers import PEERS
from benchmarks.report import describe_machine, save
from benchmarks.scale import run_scale

PARTS = ("scale", "peers")
RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
ALL_FILES = (
    *CHAT.files, "chat_atlas.jsonl.zst", "chat_instruct_mix.jsonl.zst", "code_instruct.jsonl.zst",
    "llm_arena_hard.jsonl.zst", "llm_flask.jsonl.zst", "llm_oasst_reports.jsonl.zst",
    "llm_reasoning.jsonl.zst", "llm_wildbench.jsonl.zst",
)  # fmt: skip
FIRST_5M = Source("chat_sharegpt_5M", CHAT.files, tokens=5_000_000)
ALL = Source("all_corpora", ALL_FILES)
TINY = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        scale_stores: the stores whose cost is measured.
        peer_stores: the stores that are compared with other libraries.
        rows: recorded outputs that are replayed.
        contexts: contexts that are timed.
    """

    scale_stores: tuple[Source, ...] = (FIRST_5M, CHAT, ALL)
    peer_stores: tuple[Source, ...] = (FIRST_5M, CHAT)
    rows: int = 100
    contexts: int = 3200


QUICK = Extent((TINY,), (TINY,), rows=8, contexts=320)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rest", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="any of %(default)s, joined by commas")
    parser.add_argument("--rows", type=int, help=f"recorded outputs to replay (default: {Extent.rows})")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    return args


def main() -> None:
    """Run the parts in the order that shares most stores, and finish with the JSON document."""
    args = parse_arguments()
    extent = QUICK if args.quick else Extent()
    rows = args.rows or extent.rows
    about = describe_machine([peer().package for peer in PEERS]) | {"quick": args.quick}
    figures: dict[str, Any] = {}
    parts: dict[str, Callable[[Workspace], Any]] = {
        "scale": lambda space: run_scale(space, extent.scale_stores, RECORDED, extent.contexts),
        "peers": lambda space: run_comparison(space, extent.peer_stores, RECORDED, rows, extent.contexts),
    }
    with open_workspace(args) as workspace:
        for part, run in parts.items():
            if part in args.parts.split(","):
                begin, load = perf_counter(), os.getloadavg()[0]
                figures[part] = run(workspace)
                seconds = round(perf_counter() - begin)
                own = {"load_average": load, "seconds": seconds, part: figures[part]}
                save(args.out, f"rest_{part}", about | own)
    print(json.dumps(about | figures))


if __name__ == "__main__":
    main()
