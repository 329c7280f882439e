"""The picture of agents in README and docs, drawn from the results of `python -m benchmarks.agents`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import save_svg

LABELS = {
    "request, store and live": ("draftstore: request, live, store", "#0f7b5f"),
    "request and store": ("draftstore: request, store", "#1f5f8b"),
    "request and live": ("draftstore: request, live", "#3f9b7f"),
    "request": ("draftstore: request", "#6a4c93"),
    "arctic-inference with store": ("arctic-inference: request, live, store", "#b3541e"),
    "arctic-inference": ("arctic-inference: request, live", "#d08a5e"),
    "SGLang NGRAM": ("SGLang NGRAM: live, store", "#c8862a"),
}
"""Labels of the systems with their sources of drafts, and colours."""
AGENT = "agent: "


def draw_agents(path: Path, sets: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Draw accepted lengths by set, nodes and system as bars: light for the most nodes, dark for the fewest."""
    agents = {name.removeprefix(AGENT): by_nodes for name, by_nodes in sets.items() if name.startswith(AGENT)}
    if not agents:
        return
    figure = Figure(figsize=(7.6, 2.9), layout="constrained")
    panels = figure.subplots(1, len(agents), sharey=True, squeeze=False)[0]
    for axes, (name, by_nodes) in zip(panels, agents.items(), strict=True):
        counts = sorted(by_nodes, key=int)
        systems = [system for system in LABELS if system in by_nodes[counts[0]]][::-1]
        for place, system in enumerate(systems):
            most, least = by_nodes[counts[-1]][system], by_nodes[counts[0]][system]
            axes.barh(place, most - 1, left=1, height=0.7, color=LABELS[system][1], alpha=0.45)
            axes.barh(place, least - 1, left=1, height=0.7, color=LABELS[system][1])
            axes.text(
                most, place, f" {least:.2f} / {most:.2f}", va="center", fontsize=8, color=LABELS[system][1]
            )
        axes.set_yticks(range(len(systems)), [LABELS[system][0] for system in systems], fontsize=8)
        axes.set_title(f"{name}: M with {' / '.join(counts)} nodes", fontsize="medium")
        axes.set_xlim(1, 1.35 * max(by_nodes[counts[-1]][system] for system in systems))
        axes.spines[["top", "right"]].set_visible(False)
    save_svg(figure, path)
