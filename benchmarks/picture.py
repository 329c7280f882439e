"""The picture of the README: accepted length by nodes of a draft, ours and the peers': `python -m benchmarks.picture`.

Measured here: the 100 outputs and the store that `make bench ARGS='--parts peers'` uses, drafts of 4 to 128 nodes by
REST's rule, by `backoff`, and by `backoff` with the request. The peers' figures come from what that command wrote,
OUT/rest_peers.json. A table first; the last line of stdout is one JSON document, also written to
OUT/accepted_nodes.json; the picture is docs/accepted.svg. `--draw` draws it again from both files and measures nothing.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.picture --work ~/bench
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.common import (
    CHAT,
    RecordingSet,
    Source,
    Workspace,
    accepted_length,
    add_arguments,
    evenly,
    open_workspace,
)
from benchmarks.measure import progress, undisturbed
from benchmarks.report import COLORS, describe_machine, finish, new_axes, show_table
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter

PICTURE = Path("docs/accepted.svg")
RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
ROWS, QUICK_ROWS = 100, 4
BUDGETS = (4, 8, 16, 32, 64, 128)
QUICK_SOURCE = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
LINES = {
    "backoff and request": ("draftstore: stored text and the request", "#0f7b5f"),
    "backoff": ("draftstore: stored text", COLORS["backoff"]),
    "longest": ("REST's rule, in draftstore", COLORS["longest"]),
}
"""What is drafted from, its name in the picture, its colour."""
PEERS = {
    ("arctic-inference", "tree, defaults"): ("arctic-inference, its defaults", "s"),
    ("arctic-inference", "tree, no limits"): ("arctic-inference, tree of 64", "s"),
    ("infini-gram", "greedy chain"): ("infini-gram and tokengrams, chain of 10", "^"),
}
"""Of the peers' figures: those that are drawn, under what name, with what mark."""
PEER_COLOR = "#555555"

Point = tuple[float, float]
"""Mean nodes of a draft, accepted length."""


def measure(workspace: Workspace, source: Source, rows: int) -> dict[str, list[dict[str, Any]]]:
    """Replay the outputs with every way to draft and every budget."""
    store = workspace.store(source)
    recordings = evenly(workspace.recordings(RECORDED), rows)
    backoff, request = store.drafter("backoff"), RequestDrafter(store.manifest.vocab_size)
    ways: dict[str, Drafter] = {
        "longest": store.drafter("longest"),
        "backoff": backoff,
        "backoff and request": Mixture([request, backoff]),
    }
    lines: dict[str, list[dict[str, Any]]] = {}
    for name, drafter in ways.items():
        progress(f"replay {name}")
        with undisturbed():
            lines[name] = [
                {"budget": budget} | accepted_length(drafter, recordings, budget) for budget in BUDGETS
            ]
    return lines


def points_of_peers(document: Mapping[str, Any], source: str, rows: int) -> dict[str, Point]:
    """Return the points of the peers, by the name in the picture.

    Args:
        document: what `make bench ARGS='--parts peers'` wrote.
        source: the store, as the points of draftstore have it.
        rows: the outputs, as the points of draftstore have them.

    Raises:
        SystemExit: the peers were measured on another store or on other outputs.
    """
    sizes = [size for size in document["peers"] if (size["source"], size["rows"]) == (source, rows)]
    if not sizes:
        raise SystemExit(f"no figures of the peers over {rows} outputs with the store {source}")
    contenders = {(each["system"], each["mode"]): each for each in sizes[0]["contenders"]}
    return {
        name: (contenders[mode]["nodes_mean"], contenders[mode]["accepted_length"])
        for mode, (name, _) in PEERS.items()
    }


def draw(path: Path, lines: Mapping[str, Sequence[Mapping[str, Any]]], peers: Mapping[str, Point]) -> None:
    """Draw ours as lines, the peers as points; names stand at the ends, the text stays text."""
    figure, axes = new_axes("", "nodes of a draft, mean", "accepted length M: tokens per forward pass")
    figure.set_size_inches(7.2, 3.8)
    for name, (label, color) in LINES.items():
        x, y = zip(*((each["nodes_mean"], each["accepted_length"]) for each in lines[name]), strict=True)
        axes.plot(x, y, marker="o", markersize=4, color=color)
        _name(axes, label, (x[-1], y[-1]), color, f"{y[-1]:.2f}")
    for label, mark in PEERS.values():
        axes.plot(*peers[label], mark, color=PEER_COLOR, markersize=5)
        _name(axes, label, peers[label], PEER_COLOR, f"{peers[label][1]:.2f}", small=True)
    axes.axhline(1.0, color="#999999", linewidth=0.9, linestyle=":")
    axes.annotate("plain decoding", (2.4, 1.0), xytext=(0, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log", base=2)
    ticks = (2, *BUDGETS)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlim=(2.2, 140), ylim=(0.9, 3.1))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftstore", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def _name(axes: Any, label: str, place: Point, color: str, value: str, *, small: bool = False) -> None:
    """Write a name and a value: of a line above its end, of a point (`small`) below it."""
    right = place[0] > 32
    axes.annotate(
        f"{label}: {value}", place, xytext=(6 if right else -4, -17 if small else 7),
        textcoords="offset points", ha="right" if right else "left", fontsize=8 if small else 9, color=color,
    )  # fmt: skip


def main() -> None:
    """Measure unless told not to, draw, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--draw", action="store_true", help="draw again what OUT holds; measure nothing")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: %(default)s")
    args = parser.parse_args()
    if not args.draw:
        source, rows = (QUICK_SOURCE, QUICK_ROWS) if args.quick else (CHAT, ROWS)
        with open_workspace(args) as workspace:
            lines = measure(workspace, source, rows)
        for name, points in lines.items():
            table = [[each["budget"], each["nodes_mean"], each["accepted_length"]] for each in points]
            show_table(f"{name}, {rows} outputs, store {source.name}", ["budget", "nodes", "M"], table)
        document = {"quick": args.quick, "source": source.name, "rows": rows, "lines": lines}
        finish(args.out, "accepted_nodes", describe_machine() | document)
    if args.quick and not args.draw:
        return  # the peers were measured on the whole store
    ours = json.loads((args.out / "accepted_nodes.json").read_text(encoding="utf-8"))
    theirs = json.loads((args.out / "rest_peers.json").read_text(encoding="utf-8"))
    draw(args.picture, ours["lines"], points_of_peers(theirs, ours["source"], ours["rows"]))


if __name__ == "__main__":
    main()
