"""Drafts at the seam of SGLang, without a GPU: `python -m benchmarks.engine_sglang`.

101 outputs of Vicuna-7B-v1.5 (AlpacaEval) are replayed in batches of 32, as SGLang schedules them: whoever ends makes
room for the next. What its worker would verify are the very arrays that the plug-in returns for a step
(`BatchDrafts.draft`); accepted is what a walk through tokens and mask finds, as SGLang walks. Every mask is checked.
Stored is every sixth conversation of ShareGPT, 4.5 M tokens: alone, with drafts of the request, and, where `--lookup`
names a service that serves the store, from there.

Where SGLang is installed, its own NGRAM runs beside it, with the same tokens as external corpus and the calls of its
worker. Half of its nodes may come from that corpus (all of them were worse); the others from the answers so far.

Then what drafting costs a step, all ways in turn at the same texts.

Table first; the last line of stdout is one JSON document, also written to OUT/engine_sglang.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engine_sglang --work ~/bench
    draftstore serve --store chat=$HOME/bench/stores/chat_sharegpt_sixth &
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engine_sglang --work ~/bench --lookup 127.0.0.1:7781
"""

import argparse
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, add_arguments, evenly, open_workspace
from benchmarks.measure import percentiles, progress
from benchmarks.ngram import Arrays, ask_corpus, new_corpus, parents_of
from benchmarks.report import describe_machine, finish, show_table
from draftstore.assembly import Sources
from draftstore.decoding.replay import Recording
from draftstore.engines.config import EngineConfig
from draftstore.engines.proposer import Proposer
from draftstore.engines.sglang import BatchDrafts
from draftstore.stores.rest.store import RestStore

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
STORE = Source("chat_sharegpt_sixth", CHAT.files, tokens=4_500_000, every=6)
TINY = Source("chat_sharegpt_500k", CHAT.files, tokens=500_000)
OUTPUTS, QUICK_OUTPUTS = 101, 8
BATCH = 32
NODES = (8, 16, 64)
GOALS = {8: 1.93, 16: 2.10, 64: 2.40}
STEPS, QUICK_STEPS = 200, 10
"""Timed steps."""


class Way(NamedTuple):
    """A way of drafting.

    Attributes:
        draft: returns tokens [requests * rows] and mask [requests * rows * rows] of a step.
        close: gives back what it holds.
    """

    draft: Callable[[Sequence[Any]], Arrays]
    close: Callable[[], None]


def ours(space: Workspace, sources: Sources, nodes: int) -> Way:
    """Draft as the plug-in does."""
    tokenizer = space.tokenizer
    proposer = Proposer(
        EngineConfig(sources, budget=nodes), engine="sglang", vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.identity,
    )  # fmt: skip
    drafts = BatchDrafts(proposer, nodes + 1)
    return Way(lambda requests: drafts.draft(requests, [[]] * len(requests)), proposer.close)


def theirs(store: RestStore, nodes: int) -> Way:
    """Draft as SGLang's worker does with its own corpus; half of the nodes may come from the external one."""
    corpus = new_corpus(store.index, nodes)
    return Way(lambda requests: ask_corpus(corpus, requests), corpus.reset)


class Running:
    """A recorded output that is being replayed, with the attributes of a request of SGLang."""

    def __init__(self, rid: str, recording: Recording) -> None:
        """Begin with the token of the prefill."""
        self.rid = rid
        self.origin_input_ids_unpadded = array("q", recording.prompt.tolist())
        self.output_ids = array("q", recording.output[:1].tolist())
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.output: list[int] = recording.output.tolist()

    @property
    def left(self) -> list[int]:
        """Tokens that are still to come."""
        return self.output[len(self.output_ids) :]


def requests_of(recordings: Sequence[Recording], name: str) -> deque[Running]:
    """Return the requests of all outputs with more than the token of the prefill."""
    long = [recording for recording in recordings if len(recording.output) > 1]
    return deque(Running(f"{name} {place}", recording) for place, recording in enumerate(long))


def replay(way: Way, recordings: Sequence[Recording], rows: int) -> dict[str, Any]:
    """Replay all outputs and count what is accepted.

    Raises:
        SystemExit: a mask is not that of a tree.
    """
    waiting, running = requests_of(recordings, "replayed"), list[Running]()
    tokens = passes = 0
    while waiting or running:
        while waiting and len(running) < BATCH:
            running.append(waiting.popleft())
        drafted, mask = way.draft(running)
        above = parents_of(mask.reshape(-1, rows, rows).astype(bool))
        for request, row, parents in zip(running, drafted.reshape(-1, rows), above, strict=True):
            new = request.left[: 1 + accepted(row, parents, request.left)]
            request.output_ids.extend(new)
            tokens += len(new)
            passes += 1
        running = [request for request in running if request.left]
    return {"accepted_length": round(tokens / passes, 4), "tokens": tokens, "passes": passes}


def accepted(tokens: NDArray[Any], parents: NDArray[np.int64], coming: Sequence[int]) -> int:
    """Return the number of drafted tokens that come true: a walk through first children and their siblings."""
    row, count = 0, 0
    for token in coming:
        found = np.flatnonzero((parents == row) & (tokens == token))
        if not len(found):
            break
        row, count = int(found[0]), count + 1
    return count


def time_steps(
    ways: dict[str, Way], recordings: Sequence[Recording], steps: int
) -> dict[str, dict[str, float]]:
    """Time a step of all ways in turn, at the same texts, which grow by two tokens a step; microseconds."""
    waiting, running = requests_of(list(recordings) * 3, "timed"), list[Running]()
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for step in range(-3, steps):
        while waiting and len(running) < BATCH:
            running.append(waiting.popleft())
        for name in (*names[step % len(names) :], *names[: step % len(names)]):
            begin = perf_counter_ns()
            ways[name].draft(running)
            if step >= 0:
                times[name].append((perf_counter_ns() - begin) / 1000)
        for request in running:
            request.output_ids.extend(request.left[:2])
        running = [request for request in running if request.left]
    return {name: percentiles(each) for name, each in times.items()}


def ways_of(space: Workspace, store: RestStore, nodes: int, args: argparse.Namespace) -> dict[str, Way]:
    """Open all ways that there are here."""
    ways = {
        "store": ours(space, Sources(stores=(store.path,)), nodes),
        "store and request": ours(space, Sources(stores=(store.path,), request=True), nodes),
    }
    if args.lookup:
        sources = Sources(lookup=args.lookup, release=args.release, request=True, deadline=args.deadline)
        ways["service and request"] = ours(space, sources, nodes)
    if find_spec("sglang"):
        ways["NGRAM"] = theirs(store, nodes)
    return ways


def reached(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the accepted lengths by nodes, beside the goals."""
    found: dict[str, Any] = {}
    for nodes in sorted({row["nodes"] for row in rows}):
        own = next(r for r in rows if r["nodes"] == nodes and r["way"] == "store and request")
        peers = [r["accepted_length"] for r in rows if r["nodes"] == nodes and r["way"] == "NGRAM"]
        found[str(nodes)] = {
            "ours": own["accepted_length"],
            "goal": GOALS[nodes],
            "reached": own["accepted_length"] >= GOALS[nodes],
            "ngram": max(peers, default=None),
        }
    return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_sglang", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--lookup", help="address of a lookup service that serves the store")
    parser.add_argument("--release", default="chat", help="its name there (default: %(default)s)")
    parser.add_argument(
        "--deadline", type=float, default=0.1, help="seconds that a step waits for it (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replay, time, and finish with the JSON document."""
    args = parse_arguments(arguments)
    about = describe_machine(["sglang", "torch"]) | {"quick": args.quick, "batch": BATCH}
    with open_workspace(args) as space:
        store = space.store(TINY if args.quick else STORE)
        recordings = evenly(space.recordings(RECORDED), QUICK_OUTPUTS if args.quick else OUTPUTS)
        rows: list[dict[str, Any]] = []
        for nodes in NODES:
            ways = ways_of(space, store, nodes, args)
            for name, way in ways.items():
                progress(f"{nodes} nodes: {name}")
                rows.append({"way": name, "nodes": nodes, **replay(way, recordings, nodes + 1)})
            progress(f"{nodes} nodes: time")
            times = time_steps(ways, recordings, QUICK_STEPS if args.quick else STEPS)
            for row in rows[-len(ways) :]:
                row["step_us"] = times[row["way"]]
            for way in ways.values():
                way.close()
            ways.clear()  # an external corpus of NGRAM takes gigabytes
        show_table(
            f"{len(recordings)} outputs, {store.manifest.counts['tokens']:,} tokens stored, batches of {BATCH}",
            ("way", "nodes", "tokens a pass", "step, µs p50", "p99"),
            [
                (row["way"], row["nodes"], row["accepted_length"], row["step_us"]["p50"], row["step_us"]["p99"])
                for row in rows
            ],
        )  # fmt: skip
        text = {"outputs": len(recordings), "store_tokens": store.manifest.counts["tokens"]}
        finish(args.out, "engine_sglang", about | text | {"ways": rows, "reached": reached(rows)})


if __name__ == "__main__":
    main()
