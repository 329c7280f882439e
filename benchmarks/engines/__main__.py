"""Drafts at the seams of vLLM and SGLang, without a GPU: `python -m benchmarks.engines`.

101 outputs of Vicuna-7B-v1.5 (AlpacaEval) are replayed in batches of 32, as engines schedule them: when one ends, the
next takes its place. For each step, the engine would verify what its drafter returns: chains of 8 tokens in vLLM, trees
of 8, 16 and 64 nodes in SGLang, whose masks are checked. Drafts come from the request; from it and a store of every
sixth conversation of ShareGPT, 4.5 M tokens; and from both, with the store behind the lookup service. The engines need
not be installed.

A table first; the last line of stdout is one JSON document, also written to OUT/engine_NAME.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines --engine vllm --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines --engine sglang --work ~/bench
"""

import argparse
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import (
    SIXTH,
    TINY,
    TOKENIZER,
    VICUNA,
    Workspace,
    add_arguments,
    evenly,
    open_workspace,
)
from benchmarks.engines.seams import BATCH, DEADLINE, Places, Running, Way, sglang_ways, vllm_ways
from benchmarks.measure import percentiles, progress
from benchmarks.processes import lookup_service
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.decoding.replay import Recording
from draftstore.stores.rest.store import RestStore

OUTPUTS, QUICK_OUTPUTS = 101, 8
NODES = {"vllm": (8,), "sglang": (8, 16, 64)}
RELEASE = "chat"


def replay(way: Way, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Replay all outputs; return tokens per pass and the time of a step."""
    long = [each for each in recordings if len(each.output) > 1]
    waiting = deque(Running(f"output {place}", each) for place, each in enumerate(long))
    running, times, tokens, passes = list[Running](), list[float](), 0, 0
    while waiting or running:
        while waiting and len(running) < BATCH:
            running.append(waiting.popleft())
        drafts, took = way.draft(running)
        times.append(took)
        tokens += sum(each.verify(*draft) for each, draft in zip(running, drafts, strict=True))
        passes += len(running)
        running = [each for each in running if each.left]
    spread = percentiles(times[1:])
    return {
        "accepted_length": round(tokens / passes, 4),
        "step_us_p50": spread["p50"],
        "step_us_p99": spread["p99"],
        "passes": passes,
    }


def measure(
    space: Workspace, engine: str, store: RestStore, recordings: Sequence[Recording], address: Path
) -> list[dict[str, Any]]:
    """Replay in all ways with all numbers of nodes."""
    served = {"lookup": f"unix:{address}", "release": RELEASE, "deadline": DEADLINE}
    places: Places = {
        "request": {"request": True},
        "store and request": {"stores": (store.path,), "request": True},
        "service and request": {**served, "request": True},
    }
    tokenizer, rows = space.tokenizer, []
    for nodes in NODES[engine]:
        if engine == "vllm":
            ways = vllm_ways(places, space.data / "tokenizers" / TOKENIZER, tokenizer.vocab_size, nodes)
        else:
            ways = sglang_ways(places, tokenizer, nodes)
        for name, way in ways.items():
            progress(f"{nodes} nodes: {name}")
            replay(way, recordings[:2])  # compiles what it needs
            rows.append({"way": name, "nodes": nodes, **replay(way, recordings)})
            way.close()
    return rows


def main() -> None:
    """Measure and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--engine", choices=tuple(NODES), required=True)
    args = parser.parse_args()
    about = describe_machine([args.engine, "torch"]) | {"quick": args.quick, "batch": BATCH}
    with open_workspace(args) as space, TemporaryDirectory(prefix="draftstore-bench-") as folder:
        store = space.store(TINY if args.quick else SIXTH)
        recordings = evenly(space.recordings(VICUNA), QUICK_OUTPUTS if args.quick else OUTPUTS)
        address = Path(folder) / "lookup.sock"
        with closing(
            lookup_service(address, space.work / "engines.log", "--store", f"{RELEASE}={store.path}")
        ) as service:
            service.wait_until_ready()
            rows = measure(space, args.engine, store, recordings, address)
        about |= {"outputs": len(recordings), "store_tokens": store.manifest.counts["tokens"]}
    show_rows(f"{args.engine}: {len(recordings)} outputs, batches of {BATCH}", rows)
    finish(args.out, f"engine_{args.engine}", about | {"ways": rows})


if __name__ == "__main__":
    main()
