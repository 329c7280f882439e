"""The pictures of README and docs, drawn from the results of `python -m benchmarks.quality`."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.report import new_axes, save_svg

LABELS = {
    "stored text and request": ("draftstore: stored text and request", "#0f7b5f"),
    "stored text": ("draftstore: stored text", "#1f5f8b"),
    "stored text in CREST": ("draftstore: stored text in CREST", "#4f8fc0"),
    "request": ("draftstore: request", "#6a4c93"),
    "arctic-inference": ("arctic-inference: both", "#b3541e"),
    "SGLang NGRAM": ("SGLang NGRAM: stored text, outputs", "#c8862a"),
    "prompt lookup": ("prompt lookup: request", "#8a8a8a"),
    "CREST": ("CREST: stored text", "#7a3b3b"),
    "REST": ("REST: stored text", "#444444"),
}
"""Labels of the systems with their sources of drafts, and colours."""
DOTTED = ("arctic-inference", "SGLang NGRAM", "prompt lookup", "CREST", "REST")
TITLES = {"path": "accepted, whole path", "given parent": "accepted, if its parent is"}
ALL = "all"
"""Key for all replays together."""
GAP = 0.06
"""Minimum distance between two labels, as a share of the height."""

Lengths = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Accepted lengths by replay, system and nodes."""


def means_of(replays: Lengths) -> dict[str, dict[int, float]]:
    """Return figures by system and nodes, as means over the replays."""
    found: dict[str, dict[int, list[float]]] = {}
    for systems in replays.values():
        for system, by_nodes in systems.items():
            for nodes, length in by_nodes.items():
                found.setdefault(system, {}).setdefault(int(nodes), []).append(length)
    return {
        system: {nodes: mean(lengths) for nodes, lengths in by_nodes.items()}
        for system, by_nodes in found.items()
    }


def draw_lengths(path: Path, replays: Lengths) -> None:
    """Draw a line for each system, labelled at its end; text remains text in the SVG."""
    lines = means_of(replays)
    figure, axes = new_axes("", "nodes of a draft, at most", "accepted length M: tokens per forward pass")
    figure.set_size_inches(7.6, 4.2)
    nodes = sorted({each for line in lines.values() for each in line})
    top = max(max(line.values()) for line in lines.values())
    for system, line in lines.items():
        style = "--" if system in DOTTED else "-"
        axes.plot(*zip(*line.items(), strict=True), style, marker="o", markersize=4, color=LABELS[system][1])
    ends = {system: line[nodes[-1]] for system, line in lines.items()}
    for system, height in spread(ends, GAP * (top - 1)).items():
        label, color = LABELS[system]
        axes.annotate(
            f"{label} {ends[system]:.2f}", (nodes[-1], height), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=8, color=color, annotation_clip=False,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(each) for each in nodes])
    axes.minorticks_off()
    axes.set(xlim=(nodes[0] * 0.9, nodes[-1] * 1.05), ylim=(1.0, top + 0.1))
    save_svg(figure, path)


def spread(heights: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return heights of labels at least a gap apart, the lowest unchanged."""
    found: dict[str, float] = {}
    lowest = 0.0
    for name in sorted(heights, key=heights.__getitem__):
        found[name] = max(heights[name], lowest)
        lowest = found[name] + gap
    return found


def draw_reliability(path: Path, systems: Mapping[str, Any]) -> None:
    """Draw acceptance over predicted probability for the most nodes: of paths, and of nodes given their parents.

    Args:
        path: path of the picture.
        systems: reliability by system, nodes and replay.
    """
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    own = {system: by_nodes[max(by_nodes, key=int)][ALL] for system, by_nodes in systems.items()}
    for axes, (question, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        axes.plot([0, 1], [0, 1], ":", color="#999999", linewidth=0.9)
        for system, entry in own.items():
            _, predicted, accepted = np.array(entry[question]["bins"]).T
            label, color = LABELS[system]
            name = f"{label.removeprefix('draftstore: ')}: ECE {entry[question]['ece']:.3f}"
            axes.plot(predicted, accepted, "o-", markersize=3, color=color, linewidth=1, label=name)
        axes.set(xlabel="predicted probability of a node", ylabel=title, xlim=(0, 1), ylim=(0, 1))
        axes.legend(frameon=False, fontsize=8, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    save_svg(figure, path)
