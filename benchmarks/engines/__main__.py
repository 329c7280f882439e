"""The whole call of the drafters inside vLLM and SGLang, without a GPU: `python -m benchmarks.engines`.

Outputs of Vicuna-7B-v1.5 (AlpacaEval) are replayed side by side, 1 to 256 at a time, through what the engine would call
in every step: it verifies chains of 8 tokens in vLLM, and trees of 16 nodes in SGLang. Drafts come from the request,
and also from 27.9 M tokens of ShareGPT: in a REST store, in a CREST store of 12 MB, behind the lookup service.

With --before, another checkout's drafters are measured in turn. vLLM's n-gram drafter and the suffix cache of
arctic-inference are measured beside, if the interpreter of --libraries has them; it can be that of `make test-vllm`.

With --compare, a real vLLM answers instead, with each of its drafters; see `benchmarks.engines.compare`.

A table first; the last line of stdout is one JSON document, also written to OUT/engine_NAME.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines --engine vllm --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines --engine sglang --work ~/bench --before ~/main
    make .venv-vllm/.suffix
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines --compare --work ~/bench
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import CHAT, TINY, TOKENIZER, VICUNA, Workspace, add_arguments, open_workspace
from benchmarks.engines.compare import compare
from benchmarks.measure import progress
from benchmarks.processes import CHECKOUT, Answering, lookup_service
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.decoding.replay import Recording
from draftstore.stores.crest.build import CrestOptions, build_crest

OUTPUTS, QUICK_OUTPUTS = 101, 8
"""Recorded outputs of the benchmark of llama.cpp's files."""
BATCHES, QUICK_BATCHES = (1, 8, 32, 128, 256), (1, 8)
STEPS, QUICK_STEPS = 120, 10
ROUNDS = 3
"""Replays of every cell by each checkout, in turn; the median counts."""
NODES, CREST_BYTES = 16, 12_000_000
LIBRARIES = ("vLLM n-gram", "arctic")


def start_child(checkout: Path, interpreter: str) -> Answering:
    """Start a process that measures cells with the code of a checkout, see `benchmarks.engines.seams`."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout),
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return Answering([interpreter, CHECKOUT / "benchmarks/engines/seams.py"], environment)


def measure_in_turn(children: dict[str, Answering], cell: dict[str, Any]) -> dict[str, Any]:
    """Measure a cell with all children in turn; return the medians of each, by its name."""
    rounds = [{name: child.ask(cell) for name, child in children.items()} for _ in range(ROUNDS)]
    row = {}
    for name in children:
        for key in rounds[0][name]:
            values = [each[name][key] for each in rounds]
            row[f"{name}{key}"] = values[0] if key == "missing" else median(values)
    return row


def write_texts(recordings: Sequence[Recording], path: Path) -> Path:
    """Write prompts and outputs for children."""
    parts = [part for each in recordings if len(each.output) > 1 for part in (each.prompt, each.output)]
    np.savez(path, ids=np.concatenate(parts), ends=np.cumsum([len(part) for part in parts]))
    return path


def settings_of(
    space: Workspace, address: Path, opened: ExitStack, *, quick: bool
) -> dict[str, dict[str, str]]:
    """Build the stores and start the service; return the settings of every source by its name."""
    store = space.store(TINY if quick else CHAT)
    options = CrestOptions(name=f"{store.path.name}-crest", max_bytes=CREST_BYTES)
    crest = build_crest(options, store.path, store.path.parent / options.name).path
    service = opened.enter_context(
        closing(lookup_service(address, space.work / "engines.log", "--store", f"chat={store.path}"))
    )
    service.wait_until_ready()
    served = {
        "DRAFTSTORE_LOOKUP": f"unix:{address}",
        "DRAFTSTORE_RELEASE": "chat",
        "DRAFTSTORE_DEADLINE": "0.1",
    }
    sources: dict[str, dict[str, str]] = {
        "request": {},
        "request and REST": {"DRAFTSTORE_STORES": str(store.path)},
        "request and CREST": {"DRAFTSTORE_STORES": str(crest)},
        "request and service": served,
    }
    common = {"DRAFTSTORE_REQUEST": "true", "DRAFTSTORE_BUDGET": str(NODES), "DRAFTSTORE_ADAPTIVE": "false"}
    return {name: common | settings for name, settings in sources.items()}


def main() -> None:
    """Measure and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    add_arguments(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine", choices=("vllm", "sglang"))
    which.add_argument(
        "--compare", action="store_true", help="let a real vLLM answer with each of its drafters"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements for --compare (default: 5)")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="measure another checkout in turn")
    parser.add_argument(
        "--libraries",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter with other drafters (default: this)",
    )
    args = parser.parse_args()
    if args.compare:
        with open_workspace(args) as space:
            return compare(space, 1 if args.quick else args.rounds, quick=args.quick)
    rows: list[dict[str, Any]] = []
    about = describe_machine([args.engine]) | {"quick": args.quick, "nodes": NODES}
    with open_workspace(args) as space, ExitStack() as opened:
        trees = {"": CHECKOUT} | ({"before_": args.before.resolve()} if args.before else {})
        children = {
            name: opened.enter_context(closing(start_child(tree, sys.executable)))
            for name, tree in trees.items()
        }
        other = {"": opened.enter_context(closing(start_child(CHECKOUT, args.libraries)))}
        settings = settings_of(space, space.work / "engines.sock", opened, quick=args.quick)
        cell = {
            "engine": args.engine, "nodes": NODES, "vocab_size": space.tokenizer.vocab_size,
            "steps": QUICK_STEPS if args.quick else STEPS, "tokenizer": str(space.data / "tokenizers" / TOKENIZER),
            "texts": str(write_texts(space.recordings(VICUNA), space.work / "engines.npz")),
        }  # fmt: skip
        for batch in QUICK_BATCHES if args.quick else BATCHES:
            for name in (*settings, *(LIBRARIES if args.engine == "vllm" else ())):
                progress(f"{batch} texts: {name}")
                asked = cell | {"drafter": name, "batch": batch, "settings": settings.get(name, {})}
                figures = measure_in_turn(children if name in settings else other, asked)
                if "missing" not in figures:
                    rows.append({"texts": batch, "drafts_from": name} | figures)
    show_rows(f"{args.engine}: microseconds of a step", rows)
    return finish(args.out, f"engine_{args.engine}", about | {"steps": rows})


if __name__ == "__main__":
    main()
