"""The tables of benchmarks.lookup_load."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.loadtally import LATE_MS
from benchmarks.report import show_table

PLACEMENTS = {
    "free": "processes where the system places them",
    "apart": "caller on one core, servers on another",
    "together": "all on one core",
}


GOALS_US = {1: 120.0, 32: 1200.0}
"""Longest median of a round trip for one context and for 32, CREST on LMDB."""
GOAL_RATIO = 1.3


def show_roundtrips(placement: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print round trips, and where the time beyond echo and lookup goes."""
    title = (
        f"round trips of one caller, µs, in turn in random order; {PLACEMENTS[placement]}; lookup: as the service "
        "states it; server: bare frames less echo and lookup; client: less bare frames; ratio: client / (echo + in "
        "process), all p50"
    )
    columns = [
        "store, strategy", "batch", "bytes", "client p50", "p99", "p99.9", "frames p50", "p99", "echo p50", "p99",
        "in process p50", "p99", "lookup", "server", "client", "ratio",
    ]  # fmt: skip
    table = []
    for row in rows:
        us = row["us"]
        client, frames, echo, stated = (us[kind]["p50"] for kind in ("client", "frames", "echo", "stated"))
        table.append([
            f"{row['store']} {row['strategy']}", row["batch"], f"{row['request_bytes']} {row['answer_bytes']}",
            *(us["client"][key] for key in ("p50", "p99", "p99.9")),
            *(us[kind][key] for kind in ("frames", "echo", "in process") for key in ("p50", "p99")),
            stated, frames - echo - stated, client - frames, row["ratio"],
        ])  # fmt: skip
    show_table(title, columns, table)


def show_goals(store: str, roundtrips: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Print the figures that must be shown, for the store that they are about."""
    table = [
        [f"{row['strategy']}, {placement}", row["batch"], row["us"]["client"]["p50"], GOALS_US[row["batch"]],
         row["ratio"], GOAL_RATIO]
        for placement, rows in roundtrips.items()
        for row in rows
        if row["store"] == store and row["batch"] in GOALS_US
    ]  # fmt: skip
    show_table(f"goals, {store}", ["", "batch", "client p50 µs", "at most", "ratio", "at most"], table)


def show_loads(rows: Sequence[dict[str, Any]]) -> None:
    """Print peaks, and latencies below them."""
    table, shares = [], []
    for row in rows:
        label = [f"{row['store']} backoff", row["workers"], row["batch"]]
        table += [
            [*label, peak["connections"], round(peak["answers_per_second"]), round(peak["contexts_per_second"]),
             *_latency_cells(peak), peak["worker_cpu_us"], peak["busiest_worker"], peak["generator_cpu"],
             peak["wrong"], _failures(peak)]
            for peak in row["peak"]
        ]  # fmt: skip
        for part, load in row.get("share", {}).items():
            for what, figures in (("service", load), ("echo", row["echo"][part])):
                shares.append([
                    *label, f"{float(part):.0%}", round(load["rate"]), what, *_latency_cells(figures),
                    *_late_cells(figures), figures["wrong"], _failures(figures),
                ])  # fmt: skip
    latency = ["p50 µs", "p99", "p99.9"]
    show_table(
        "peak: closed loop; worker µs: processor time an answer; busiest: part of it that one worker bears",
        ["store", "workers", "batch", "connections", "answers/s", "contexts/s", *latency, "worker µs", "busiest",
         "generator cores", "wrong", "failed"], table,
    )  # fmt: skip
    if shares:
        show_table(
            "part of the peak: requests at even distances over many connections, latency from when they were due; "
            "an echo of the same sizes under the same load",
            ["store", "workers", "batch", "load", "requests/s", "", *latency,
             *(f"> {limit} ms" for limit in LATE_MS), "wrong", "failed"], shares,
        )  # fmt: skip


def _late_cells(load: Mapping[str, Any]) -> list[object]:
    """Return how many answers of a load were late."""
    return list(load["latency_us"].get("late", {}).values())


def _latency_cells(load: Mapping[str, Any]) -> list[object]:
    """Return p50, p99 and p99.9 of a load."""
    return [load["latency_us"].get(key, "") for key in ("p50", "p99", "p99.9")]


def _failures(load: Mapping[str, Any]) -> int:
    """Return the number of requests without an answer."""
    return int(sum(load["problems"].values())) - int(load["wrong"])


def show_swaps(rows: Sequence[dict[str, Any]]) -> None:
    """Print latencies in peace and while releases move."""
    table = []
    for row in rows:
        for label, load in (("in peace", row["peace"]), (f"{len(row['moves'])} moves", row["moving"])):
            table.append([
                row["store"], row["workers"], label, round(load["rate"]), len(load["builds"]), *_latency_cells(load),
                load["latency_us"].get("max", ""), *_late_cells(load), load["wrong"], _failures(load),
            ])  # fmt: skip
    columns = [
        "release", "workers", "", "requests/s", "builds seen", "p50 µs", "p99", "p99.9", "max", "> 2 ms", "> 5 ms",
        "> 10 ms", "> 50 ms", "wrong", "failed",
    ]  # fmt: skip
    show_table("one context a request at half of the peak, while the release moves", columns, table)
