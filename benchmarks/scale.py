"""What a store costs by size: build time, memory, disk, opening, and time of a draft."""

import json
import os
import shutil
from typing import Any

import numpy as np

from benchmarks.common import STRATEGY_NAMES, TOKENIZER, RecordingSet, Source, Workspace, draw_contexts
from benchmarks.measure import ONE_CORE, progress, run_fresh
from benchmarks.report import show_table
from draftstore.stores.rest.store import MAX_MATCH

MEMORY_QUERIES = 1000
SLACK = 1.02  # segments end with a document, not exactly where they are full


def run_scale(
    workspace: Workspace, sources: tuple[Source, ...], recorded: RecordingSet, contexts: int
) -> list[dict[str, Any]]:
    """Measure every source; print the tables."""
    path = workspace.work / "scale-contexts.npy"
    np.save(path, draw_contexts(workspace.recordings(recorded), contexts, MAX_MATCH))
    sizes = []
    for source in sources:
        progress(f"scale {source.name}")
        figures: dict[str, Any] = {"source": source.name, "build": _build(workspace, source)}
        store = str(workspace.store_path(source))
        figures |= run_fresh("benchmarks.buildprobe", {"what": "sort_memory", "store": store})
        asked = {"store": store, "contexts": str(path)}
        memory = {"what": "memory", **asked, "queries": MEMORY_QUERIES}
        figures["memory"] = {
            name: run_fresh("benchmarks.queryprobe", memory | {"strategy": name}) for name in STRATEGY_NAMES
        }
        figures |= run_fresh(
            "benchmarks.queryprobe", {"what": "queries", **asked, "strategies": STRATEGY_NAMES}
        )
        sizes.append(figures)
    _show_builds(sizes)
    _show_queries(sizes, contexts)
    _show_memory(sizes)
    return sizes


def _build(workspace: Workspace, source: Source) -> dict[str, Any]:
    """Build on one core and on all, or return what an earlier run has noted of the store that is there."""
    store = workspace.store_path(source)
    note = store.with_name(f"{store.name}.build.json")
    if note.exists() and store.exists():
        progress(f"  {store} is there: figures of its build are those of {note.name}")
        noted: dict[str, Any] = json.loads(note.read_text())
        return noted | {"reused": True}
    arguments = {
        "what": "build",
        "inputs": [str(path) for path in workspace.inputs(source)],
        "tokenizer": str(workspace.data / "tokenizers" / TOKENIZER),
        "name": source.name,
    }
    one = run_fresh("benchmarks.buildprobe", arguments | {"out": str(store), "workers": 1}, ONE_CORE)
    cores = len(os.sched_getaffinity(0))
    several = store.with_name(f"{store.name}-segments")
    segment_tokens = int(one["entries"] / cores * SLACK) + 1
    all_cores = arguments | {"out": str(several), "workers": cores, "segment_tokens": segment_tokens}
    figures = {"one_core": one, "all_cores": run_fresh("benchmarks.buildprobe", all_cores)}
    shutil.rmtree(several)
    note.write_text(json.dumps(figures))
    return figures


def _show_builds(sizes: list[dict[str, Any]]) -> None:
    """Print what building costs."""
    rows = []
    for figures in sizes:
        for build in (figures["build"]["one_core"], figures["build"]["all_cores"]):
            one_core = build["workers"] == 1
            rows.append([
                figures["source"], build["tokens"], build["workers"], build["segments"],
                build["tokenize_seconds"], build["sort_seconds"], build["other_seconds"],
                build["build_seconds"], build["tokenize_tokens_per_second"], build["sort_tokens_per_second"],
                figures["sort_peak_bytes_per_token"] if one_core else "", build["bytes_per_token"],
            ])  # fmt: skip
    columns = [
        "store", "tokens", "cores", "segments", "tokenize s", "sort s", "other s", "build s",
        "tokenize/s", "sort/s", "sort peak B/token", "disk B/token",
    ]  # fmt: skip
    show_table("builds (sort peak: memory beyond the tokens, the suffix array included)", columns, rows)


def _show_queries(sizes: list[dict[str, Any]], contexts: int) -> None:
    """Print how fast an open store answers."""
    rows = []
    for figures in sizes:
        for name in STRATEGY_NAMES:
            query, batch = figures[name]["query_us"], figures[name]["batch"]
            first = figures["memory"][name]["first_queries_us"]
            rows.append([
                f"{figures['source']}, {name}", query["p50"], query["p99"], query["mean"],
                figures[name]["nodes_mean"], first["p50"], first["p99"], batch["one_call_us"],
                batch["single_calls_us"],
            ])  # fmt: skip
    columns = ["store, strategy", "p50 µs", "p99 µs", "mean µs", "nodes", "first p50 µs", "first p99 µs"]
    size = sizes[0][STRATEGY_NAMES[0]]["batch"]["size"]
    title = f"one draft, {contexts:,} contexts, one core; first: the first {MEMORY_QUERIES:,} after opening"
    show_table(title, [*columns, f"{size} in one call µs", f"{size} calls µs"], rows)


def _show_memory(sizes: list[dict[str, Any]]) -> None:
    """Print what an open store takes of the memory."""
    steps = ("opened", "kernels", "queried")
    rows = []
    for figures in sizes:
        for name in STRATEGY_NAMES:
            memory = figures["memory"][name]
            megabytes = [memory[step][kind] / 1e6 for step in steps for kind in ("anonymous", "store")]
            rows.append([f"{figures['source']}, {name}", figures["open_ms"], *megabytes])
    labels = ("opened", "kernels loaded", f"{MEMORY_QUERIES:,} drafts")
    columns = [f"{label}: {kind} MB" for label in labels for kind in ("anonymous", "store")]
    title = (
        "memory: anonymous beyond a process that has imported numba, and resident pages of the store's files"
    )
    show_table(title, ["store, strategy", "open ms", *columns], rows)
