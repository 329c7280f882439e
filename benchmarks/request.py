"""The constants and the time of drafts from the request: `python -m benchmarks.request`.

Two parts, each a table:

- how the constants of `RequestRule` were chosen: one is varied at a time, mixed with REST's `backoff`, 64 nodes, on
  tuning sets that share no row with what `benchmarks.quality` reports;
- time by the length of the text: to start a session, to append a token, to draft.

The last line of stdout is one JSON document, also written to OUT/request.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.request --work ~/bench --wheels ~/wheels
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from statistics import mean
from time import perf_counter, perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.common import CHAT, CODE, RecordingSet, Source, Workspace, add_arguments, open_workspace
from benchmarks.measure import percentiles, progress
from benchmarks.replays import SPEC_BENCH
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.history import RequestRule
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.storage.report import ReadReport
from draftstore.stores.rest.store import BUDGET
from draftstore.text.corpus import read_corpus

Rows = dict[str, tuple[Source, list[Recording]]]
"""Recordings by name, and the source of the store that goes with them."""

TUNING: dict[str, tuple[Source, RecordingSet, slice]] = {
    "spec_bench": (CHAT, SPEC_BENCH, slice(None, None, 2)),
    "sharegpt": (CHAT, RecordingSet("sharegpt.jsonl.zst"), slice(None, None, 5)),
    "alpaca, llama-2": (
        CHAT,
        RecordingSet("alpaca_eval.jsonl.zst", "llama-2-7b-chat-hf"),
        slice(None, None, 8),
    ),
    "mbpp": (CODE, RecordingSet("mbpp.jsonl.zst", "CodeLlama-34b-Instruct-hf"), slice(120)),
    "humaneval, gpt-4": (CODE, RecordingSet("humaneval.jsonl.zst", "gpt-4-1106-preview"), slice(None)),
}
GRID: dict[str, tuple[float, ...]] = {
    "alpha": (0.5, 1.0, 3.0),
    "beta": (1.0, 1.5, 2.5, 3.0),
    "doubt": (0.0, 0.02, 0.1),
    "max_match": (8, 16, 64),
    "depth": (10, 32),
    "rows": (8, 16, 128),
    "floor": (0.003, 0.03),
}
TEXT_SIZES = (1_000, 8_000, 32_000, 128_000)
TIMED = 1000
"""Drafts that are timed of each text."""
QUICK_ROWS = 4
PRESENT = "present"


class Stores:
    """The drafters of stores, each opened once."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._known: dict[Source, Drafter] = {}

    def __call__(self, source: Source) -> Drafter:
        """Return a drafter by `backoff`; the store is built if it is not there yet."""
        if source not in self._known:
            drafter = self._workspace.store(source).drafter("backoff")
            drafter.warm_up()
            self._known[source] = drafter
        return self._known[source]


def figures_of(drafter: Drafter, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Replay recordings."""
    return replay(drafter, recordings, budget=BUDGET).summary()


def tuning_rows(workspace: Workspace, limit: int | None) -> Rows:
    """Read the tuning sets."""
    return {
        name: (source, workspace.recordings(recorded)[rows][:limit])
        for name, (source, recorded, rows) in TUNING.items()
    }


def evaluate(rows: Rows, make: Callable[[Source], Drafter]) -> dict[str, Any]:
    """Replay all tuning sets with the drafters that `make` makes."""
    lengths = {
        name: figures_of(make(source), recordings)["accepted_length"]
        for name, (source, recordings) in rows.items()
    }
    return {"accepted_length": lengths, "mean": round(mean(lengths.values()), 4)}


def tune(rows: Rows, stores: Stores, vocab_size: int) -> dict[str, Any]:
    """Vary the constants one by one, mixed with the store."""

    def mixed(rule: RequestRule) -> dict[str, Any]:
        return evaluate(rows, lambda source: Mixture([RequestDrafter(vocab_size, rule), stores(source)]))

    present = RequestRule()
    results = {PRESENT: mixed(present)}
    for name, values in GRID.items():
        progress(f"tune {name}")
        for value in values:
            kind = type(getattr(present, name))
            results[f"{name} {value:g}"] = mixed(present._replace(**{name: kind(value)}))
    _show_lengths("accepted length of backoff + request on the tuning sets, by constants", rows, results)
    return results


def time_texts(workspace: Workspace, vocab_size: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time sessions over longer and longer texts: chats, one behind the other."""
    render = partial(workspace.tokenizer.render_chat, add_generation_prompt=False)
    documents = read_corpus(workspace.inputs(CHAT), render=render, report=ReadReport())
    encoded = (workspace.tokenizer.encode(document.text, bos=False).tolist() for document in documents)
    text = np.fromiter(islice(chain.from_iterable(encoded), max(sizes) + TIMED), np.int32)
    drafter = RequestDrafter(vocab_size)
    drafter.warm_up()
    results = []
    for size in sizes:
        progress(f"text of {size:,} tokens")
        results.append({"tokens": size} | _time_text(drafter, text[: size + TIMED], size))
    columns = ["tokens", "session ms", "append p50 µs", "draft p50 µs", "draft p99 µs"]
    table = [
        [f"{each['tokens']:,}", each["session_ms"], each["append_us"]["p50"], each["draft_us"]["p50"],
         each["draft_us"]["p99"]]
        for each in results
    ]  # fmt: skip
    show_table(f"time by the length of the text, {BUDGET} nodes", columns, table)
    return results


def _time_text(drafter: RequestDrafter, text: Any, size: int) -> dict[str, Any]:
    """Time a session that starts with `size` tokens and then gets the others one by one."""
    begin = perf_counter()
    session = drafter.session(text[:size])
    session_ms = round(1000 * (perf_counter() - begin), 2)
    drafts, appends = [], []
    for place in range(size, len(text)):
        begin_ns = perf_counter_ns()
        session.propose(BUDGET)
        drafted_ns = perf_counter_ns()
        session.observe(text[place : place + 1])
        appends.append(perf_counter_ns() - drafted_ns)
        drafts.append(drafted_ns - begin_ns)
    return {
        "session_ms": session_ms,
        "append_us": percentiles(np.array(appends) / 1000),
        "draft_us": percentiles(np.array(drafts) / 1000),
    }


def _show_lengths(title: str, rows: Rows, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the accepted lengths of every candidate, best first."""
    best_first = sorted(results, key=lambda label: -results[label]["mean"])
    table = [
        [f"{label} <- chosen" if label == PRESENT else label, *results[label]["accepted_length"].values(),
         f"{results[label]['mean']:.4f}"]
        for label in best_first
    ]  # fmt: skip
    named = [f"{name} ({len(recordings)})" for name, (_, recordings) in rows.items()]
    show_table(title, ["candidate", *named, "mean M"], table)


def main() -> None:
    """Run all parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request", description=__doc__)
    add_arguments(parser, code=True)
    args = parser.parse_args()
    document = describe_machine() | {"quick": args.quick, "budget": BUDGET}
    limit = QUICK_ROWS if args.quick else None
    with open_workspace(args) as workspace:
        vocab_size, stores = workspace.tokenizer.vocab_size, Stores(workspace)
        rows = tuning_rows(workspace, limit)
        document["tuning"] = tune(rows, stores, vocab_size)
        document["texts"] = time_texts(workspace, vocab_size, TEXT_SIZES[:2] if args.quick else TEXT_SIZES)
        finish(args.out, "request", document)


if __name__ == "__main__":
    main()
