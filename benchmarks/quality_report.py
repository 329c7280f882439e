"""What `benchmarks.quality` prints and keeps of its cells."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.picture import ALL, mean_lengths
from benchmarks.reliability import Reliability
from benchmarks.report import show_table, without

Cell = dict[str, Any]
"""Figures of one system on one replay, with its place: size, system, replay, nodes."""
LENGTH_KEYS = ("size", "replay", "system", "nodes")


def judge(cells: Sequence[Cell]) -> list[Cell]:
    """Return the reliability of every system by size, nodes and replay, and over all replays together."""
    judged = []
    promising = [cell for cell in cells if "sums" in cell]
    for size, system, nodes in dict.fromkeys((c["size"], c["system"], c["nodes"]) for c in promising):
        own = [c for c in promising if (c["size"], c["system"], c["nodes"]) == (size, system, nodes)]
        for replay, of_replay in [(ALL, own), *((cell["replay"], [cell]) for cell in own)]:
            total = Reliability()
            total.sums += np.sum([cell["sums"] for cell in of_replay], axis=0)
            place = {"size": size, "system": system, "nodes": nodes, "replay": replay}
            judged.append(place | total.summary())
    return judged


def figures_of(cells: Sequence[Cell], times: Sequence[Cell], judged: Sequence[Cell]) -> dict[str, Any]:
    """Return all figures by size, replay, system and nodes; the bins of reliability only over all replays."""
    held = ("bytes_a_token", "mapped")
    return {
        "accepted_length": nested(cells, LENGTH_KEYS, lambda cell: cell["accepted_length"]),
        "nodes_mean": nested(cells, LENGTH_KEYS, lambda cell: cell["nodes_mean"]),
        "memory": nested(cells, ("size", "system"), lambda cell: {key: cell[key] for key in held}),
        "us": nested(times, LENGTH_KEYS, lambda cell: {key: cell[key] for key in ("draft", "learn")}),
        "calibration": nested(judged, ("size", "system", "nodes", "replay"), _kept),
    }


def _kept(cell: Cell) -> Any:
    """Return what is kept of the reliability on a replay."""
    return without(cell, (*LENGTH_KEYS, *(("bins",) if cell["replay"] != ALL else ())))


def nested(cells: Iterable[Cell], keys: Sequence[str], value: Callable[[Cell], Any]) -> dict[str, Any]:
    """Return values of cells in mappings within mappings, by the values of some keys."""
    found: dict[str, Any] = {}
    for cell in cells:
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(str(cell[key]), {})
        inner[str(cell[keys[-1]])] = value(cell)
    return found


def show_calibration(judged: Iterable[Cell]) -> None:
    """Print the errors, and what was promised by what was accepted."""
    rows = [
        [f"{cell['size']}: {cell['system']}", cell["nodes"], cell["replay"]]
        + [cell[question][key] for question in ("path", "given parent") for key in ("ece", "promised")]
        for cell in judged
    ]
    columns = ["drafts", "nodes", "replay", "path: ECE", "promised", "given parent: ECE", "promised"]
    show_table("expected calibration error of drafted nodes; promised by accepted nodes", columns, rows)


def show_lengths(cells: Sequence[Cell], times: Sequence[Cell]) -> None:
    """Print for each size: accepted lengths of the replays by nodes, their means beside the memory, and the times."""
    figures = figures_of(cells, times, [])
    nodes = list(dict.fromkeys(str(cell["nodes"]) for cell in cells))
    for size, replays in figures["accepted_length"].items():
        show_table(f"accepted length by nodes, {size} texts", ["drafts", *nodes], _rows(replays, str))
        held = figures["memory"][size]
        rows = [
            [
                system,
                *by_nodes.values(),
                held[system]["bytes_a_token"],
                "files" if held[system]["mapped"] else "memory",
            ]
            for system, by_nodes in mean_lengths(replays).items()
        ]
        show_table(f"mean of the replays, {size} texts", ["drafts", *nodes, "bytes a token", "in"], rows)
        if timed := figures["us"].get(size):
            title = f"µs of a draft, p50 (p99), {size} texts, in turn with all others, on one core"
            show_table(title, ["drafts", *nodes], _rows(timed, _time))


def _rows(
    replays: Mapping[str, Mapping[str, Mapping[str, Any]]], text: Callable[[Any], str]
) -> list[list[str]]:
    """Return a row for each replay and system."""
    return [
        [f"{replay}: {system}", *map(text, by_nodes.values())]
        for replay, systems in replays.items()
        for system, by_nodes in systems.items()
    ]


def _time(taken: Mapping[str, Any]) -> str:
    return f"{taken['draft']['p50']:.0f} ({taken['draft']['p99']:.0f})"
