"""The cost of REST stores by size: `python -m benchmarks.stores.scale`.

Time of building, time and memory of sorting, disk space, opening, memory of an open store, and time of a draft; each in
a fresh process.
Tables first; the last line of stdout is one JSON document, also written to OUT/rest_scale.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.stores.scale --work ~/bench
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import (
    CHAT,
    STRATEGY_NAMES,
    TOKENIZER,
    Source,
    Workspace,
    add_arguments,
    draw_contexts,
    open_workspace,
)
from benchmarks.measure import (
    call_fresh,
    map_pages,
    peak_resident,
    percentiles,
    progress,
    reset_peak,
    resident,
    time_calls,
    undisturbed,
)
from benchmarks.quality.replays import REPLAYS
from benchmarks.report import describe_machine, finish, show_table
from draftstore.search.suffix import index_segment
from draftstore.storage.report import OnProgress
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import MAX_MATCH, RestStore
from draftstore.text.tokenizer import load_tokenizer

ALL_FILES = (
    *CHAT.files, "chat_atlas.jsonl.zst", "chat_instruct_mix.jsonl.zst", "code_instruct.jsonl.zst",
    "llm_arena_hard.jsonl.zst", "llm_flask.jsonl.zst", "llm_oasst_reports.jsonl.zst",
    "llm_reasoning.jsonl.zst", "llm_wildbench.jsonl.zst",
)  # fmt: skip
SOURCES = (
    Source("chat_sharegpt_5M", CHAT.files, tokens=5_000_000),
    CHAT,
    Source("all_corpora", ALL_FILES),
)
QUICK = (Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000),)
REPLAY = "AlpacaEval: Vicuna-7B-v1.5"
CONTEXTS, QUICK_CONTEXTS = 3200, 320
OPENINGS = 20
SLACK = 1.02
"""Segments end with a document, not exactly when they are full."""


def measure_build(
    inputs: Sequence[Path], tokenizer: Path, out: Path, workers: int, segment_tokens: int | None = None
) -> dict[str, Any]:
    """Build a store and time it."""
    options = RestOptions(corpus=tuple(inputs), name=out.name)
    if segment_tokens:
        options = options.changed(segment_tokens=segment_tokens)
    text_tokenizer = load_tokenizer(tokenizer, name=tokenizer.name)
    _warm_up_sorting(text_tokenizer.vocab_size)
    reports: dict[str, list[float]] = {"tokenizing": [], "sorting": [], "hashing": []}

    def note(step: str, _unit: str) -> OnProgress:
        return lambda _done, _total, _detail="": reports[step].append(perf_counter())

    begin = perf_counter()
    built = build_rest(
        options, text_tokenizer, out, overwrite=True, workers=workers,
        progress=note,
    )  # fmt: skip
    counts = built.manifest.counts
    phases = {"tokenize": reports["tokenizing"], "sort": reports["sorting"]}
    spent = {phase: times[-1] - times[0] for phase, times in phases.items()}
    size = sum(path.stat().st_size for path in built.path.rglob("*") if path.is_file())
    return {
        "workers": workers,
        **{key: counts[key] for key in ("documents", "tokens", "entries", "segments")},
        "build_seconds": round(perf_counter() - begin, 2),
        **{f"{phase}_seconds": round(seconds, 2) for phase, seconds in spent.items()},
        "sort_tokens_per_second": round(counts["entries"] / spent["sort"]),
        "bytes_per_token": round(size / counts["tokens"], 3),
    }


def _warm_up_sorting(vocab_size: int) -> None:
    """Load the sorting kernels, compiling them if necessary, outside the timed part."""
    index_segment(np.random.default_rng(0).integers(0, 3, 1000).astype(np.uint16), vocab_size)


def measure_sort_memory(store: Path) -> float:
    """Sort the first segment of a store again; return the peak memory beyond its tokens, in bytes per token."""
    index = RestStore.open(store).index
    _warm_up_sorting(index.vocab_size)
    tokens = np.array(index.tokens[: int(index.segments[0, 1])])
    reset_peak()
    before = sum(resident().values())
    index_segment(tokens, index.vocab_size)
    return round((peak_resident() - before) / len(tokens), 3)


def measure_drafts(store: Path, contexts: NDArray[np.int32]) -> dict[str, Any]:
    """Measure the anonymous memory of an open store, then opening and drafts with its pages in memory."""
    base = resident()["anonymous"]
    memory = {}
    opened = RestStore.open(store)
    memory["opened"] = resident()["anonymous"] - base
    opened.drafter().warm_up()
    memory["kernels"] = resident()["anonymous"] - base
    map_pages(opened.index)
    found: dict[str, Any] = {"memory": memory}
    with undisturbed():
        openings = time_calls([lambda: RestStore.open(store)] * OPENINGS)
        found["open_ms"] = round(median(openings) / 1000, 3)
        for name in STRATEGY_NAMES:
            drafter = opened.drafter(name)
            drafter.warm_up()
            sessions = [drafter.session(context[context >= 0]) for context in contexts]
            found[name] = percentiles(time_calls([session.propose for session in sessions]))
    return found


def run(workspace: Workspace, source: Source, contexts: NDArray[np.int32]) -> dict[str, Any]:
    """Measure one size: builds on one core and on all cores, then the store of the first build."""
    progress(f"scale {source.name}")
    inputs, tokenizer = workspace.inputs(source), workspace.data / "tokenizers" / TOKENIZER
    store, cores = workspace.store_path(source), len(os.sched_getaffinity(0))
    one = call_fresh(measure_build, inputs, tokenizer, store, 1)
    with TemporaryDirectory(dir=workspace.work) as folder:
        several, segment = Path(folder) / source.name, int(one["entries"] / cores * SLACK) + 1
        all_ = call_fresh(measure_build, inputs, tokenizer, several, cores, segment, one_core=False)
    return {
        "source": source.name,
        "build": {"one_core": one, "all_cores": all_},
        "sort_peak_bytes_per_token": call_fresh(measure_sort_memory, store),
        **call_fresh(measure_drafts, store, contexts),
    }


def show(sizes: Sequence[dict[str, Any]]) -> None:
    """Print the costs of building and of an open store."""
    keys = [
        "tokens",
        "workers",
        "build_seconds",
        "tokenize_seconds",
        "sort_seconds",
        "sort_tokens_per_second",
    ]
    rows = [
        [size["source"], *(build[key] for key in keys), build["bytes_per_token"]]
        for size in sizes
        for build in (size["build"]["one_core"], size["build"]["all_cores"])
    ]
    columns = ["store", "tokens", "cores", "build s", "tokenize s", "sort s", "sort/s", "disk B/token"]
    show_table("builds", columns, rows)
    rows = [
        [
            f"{size['source']}, {name}",
            size["open_ms"],
            *(held / 1e6 for held in size["memory"].values()),
            size["sort_peak_bytes_per_token"],
            *(size[name][key] for key in ("p50", "p99", "mean")),
        ]
        for size in sizes
        for name in STRATEGY_NAMES
    ]
    columns = [
        "store, strategy",
        "open ms",
        "opened MB",
        "kernels MB",
        "sorting B/token",
        "draft p50 µs",
        "p99",
        "mean",
    ]
    show_table("an open store: anonymous memory; one draft on one core", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every size and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores.scale", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    about = describe_machine() | {"quick": args.quick, "load_average": os.getloadavg()[0]}
    with open_workspace(args) as workspace:
        recordings = REPLAYS[REPLAY].read(workspace)
        contexts = draw_contexts(recordings, QUICK_CONTEXTS if args.quick else CONTEXTS, MAX_MATCH)
        sizes = [run(workspace, source, contexts) for source in (QUICK if args.quick else SOURCES)]
    show(sizes)
    finish(args.out, "rest_scale", about | {"scale": sizes})


if __name__ == "__main__":
    main()
