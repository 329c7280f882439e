"""draftstore against other libraries over the same texts and contexts: accepted length, time, memory."""

from typing import Any

import numpy as np

from benchmarks.common import RecordingSet, Source, Workspace, draw_contexts
from benchmarks.measure import ONE_CORE, progress, run_fresh
from benchmarks.peerprobe import REFERENCE
from benchmarks.report import show_table
from draftstore.stores.rest.store import MAX_MATCH


def run_comparison(
    workspace: Workspace, sources: tuple[Source, ...], recorded: RecordingSet, rows: int, timed: int
) -> list[dict[str, Any]]:
    """Compare at every size, each in a process of its own; print a table for each."""
    path = workspace.work / "peer-contexts.npy"
    np.save(path, draw_contexts(workspace.recordings(recorded), timed, MAX_MATCH + 1))
    sizes = []
    for source in sources:
        workspace.store(source)
        progress(f"peers at {source.name}")
        arguments = {
            "data": str(workspace.data), "work": str(workspace.work),
            "store": str(workspace.store_path(source)), "contexts": str(path),
            "file": recorded.file, "model": recorded.model, "rows": rows,
        }  # fmt: skip
        figures = {"source": source.name} | run_fresh("benchmarks.peerprobe", arguments, ONE_CORE)
        _add_ratios(figures["contenders"])
        _show(figures, timed)
        sizes.append(figures)
    return sizes


def _add_ratios(contenders: list[dict[str, Any]]) -> None:
    """Relate the figures of every contender to the reference; times, to those taken beside it."""
    reference = next(entry for entry in contenders if entry["mode"] == REFERENCE)
    for entry in contenders:
        times = {
            f"query_{key}": entry["query_us"][key] / entry["reference_query_us"][key]
            for key in ("p50", "p99", "mean")
        }
        plain = ("accepted_length", "build_tokens_per_second", "memory_bytes_per_token")
        ratios = {key: entry[key] / reference[key] for key in plain} | times
        entry["ratios"] = {key: round(value, 3) for key, value in ratios.items()}


def _show(figures: dict[str, Any], timed: int) -> None:
    """Print one size: a table of figures and one of ratios."""
    shape = f"{figures['tokens']:,} tokens"
    names = [f"{entry['system']} ({entry['mode']})" for entry in figures["contenders"]]
    rows, ratios = [], []
    for name, entry in zip(names, figures["contenders"], strict=True):
        query, beside = entry["query_us"], entry["reference_query_us"]
        costs = [entry["build_tokens_per_second"], entry["memory_bytes_per_token"]]
        times = [query["p50"], query["p99"], query["mean"], beside["p50"], beside["p99"]]
        rows.append([name, entry["accepted_length"], entry["nodes_mean"], *times, *costs])
        ratios.append([name, *entry["ratios"].values()])
    columns = [
        "M",
        "nodes",
        "p50 µs",
        "p99 µs",
        "mean µs",
        "ours beside: p50",
        "p99",
        "build tokens/s",
        "memory B/token",
    ]
    title = (
        f"{shape}; M over {figures['rows']} outputs; {timed:,} contexts, in turn with {REFERENCE}, one core"
    )
    show_table(title, ["drafter", *columns], rows)
    measures = ["M", "build tokens/s", "memory B/token", "p50", "p99", "mean"]
    show_table(f"{shape}: ratio to draftstore ({REFERENCE})", ["drafter", *measures], ratios)
    for package, reason in figures["absent"].items():
        print(f"{package}: {reason}")
