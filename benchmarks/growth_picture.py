"""The picture of benchmarks.growth: accepted length over tokens, with the law drawn on and its range."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from draftstore.sizing import Law
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.growth_law import FAR
from benchmarks.picture import save_svg

PICTURE = Path("docs/growth.svg")
COLORS = {"REST": "#1f5f8b", "CREST, 50 MB": "#0f7b5f", "CREST, 10 MB": "#c8862a"}
NODES = "64"


def draw_growth(path: Path, measured: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Draw a field for each replay: points of samples, the law through them, its range beyond; others hollow."""
    replays = list(dict.fromkeys((law["kind"], law["replay"]) for law in laws))
    figure = Figure(figsize=(3.6 * len(replays), 3.6), layout="constrained")
    fields = figure.subplots(1, len(replays), sharey=True, squeeze=False)[0]
    for axes, (kind, replay) in zip(fields, replays, strict=True):
        axes.set(xlabel="tokens of stored text", title=f"{replay}\nfrom {kind}", xscale="log")
        axes.title.set_fontsize("medium")
        axes.grid(visible=True, axis="y", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        for law in laws:
            if (law["kind"], law["replay"], str(law["nodes"])) == (kind, replay, NODES):
                _draw_law(axes, law, [each for each in measured if each["kind"] in (kind, "all")])
    fields[0].set_ylabel("accepted length M, 64 nodes")
    fields[0].legend(frameon=False, fontsize=8, loc="upper left")
    save_svg(figure, path)


def _draw_law(axes: Axes, fitted: dict[str, Any], points: Sequence[dict[str, Any]]) -> None:
    """Draw the points of a store, the law inside of them as a line, and beyond them dashed, in its range."""
    store, color, law = fitted["store"], COLORS[fitted["store"]], Law(**fitted["law"])
    for nested, face in ((True, color), (False, "white")):
        own = [each for each in points if each["nested"] == nested and store in each["accepted_length"]]
        y = [each["accepted_length"][store][fitted["replay"]][NODES] for each in own]
        x = [each["tokens"] for each in own]
        label = store if nested else None
        axes.plot(x, y, "o", markersize=4, color=color, markerfacecolor=face, label=label)
        if nested:
            axes.plot(x, [law.at(each)[1] for each in x], color=color, linewidth=1.2)
    if store == "REST":
        far = np.geomspace(law.most, FAR, 40)
        least, likely, most = np.array([law.at(each) for each in far]).T
        axes.plot(far, likely, "--", color=color, linewidth=1.0)
        axes.fill_between(far, least, most, color=color, alpha=0.12, linewidth=0)
        axes.annotate(
            f"{likely[-1]:.1f}", (FAR, likely[-1]), xytext=(2, 4), textcoords="offset points", fontsize=8
        )
