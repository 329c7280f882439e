"""Pictures of accepted length over bytes: a logarithmic axis, every curve with its name in the margin."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.report import new_axes

Y_LABEL = "accepted length M (tokens per forward pass)"
X_LABEL = "bytes of the store"
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
MARGIN = 1.04
"""Where names begin, in widths of the axes."""
LINE_HEIGHT = 0.055
"""Least distance of two names, in heights of the axes."""
FAINT = "#999999"
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
"""The line from a name to the end of its curve."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        name: shown in the margin.
        points: bytes and accepted length of each, in ascending order.
        color: of line and name.
        dashed: drawn dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    dashed: bool = False


def save_curves(
    path: Path, title: str, curves: Sequence[Curve], level: Curve, marks: dict[str, float]
) -> None:
    """Draw curves.

    Args:
        path: the picture.
        title: over it.
        curves: what is drawn.
        level: its last M is drawn as a horizontal line to compare with; named unless it is one of the curves.
        marks: bytes of vertical lines, by name.
    """
    figure, axes = new_axes(title, X_LABEL, Y_LABEL)
    figure.set_size_inches(7.2, 4.2)
    for curve in curves:
        x, y = zip(*curve.points, strict=True)
        style = "--" if curve.dashed else "-"
        axes.plot(x, y, style, marker="o", markersize=3.5, linewidth=1.4, color=curve.color)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 3.0), numticks=20))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: in_units(size)))
    base = level.points[-1][1]
    axes.axhline(base, color=FAINT, linewidth=0.9, linestyle=":")
    for name, size in marks.items():
        axes.axvline(size, color=FAINT, linewidth=0.9, linestyle=":")
        axes.annotate(
            name, (size, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", fontsize=7, color="#666666",
        )  # fmt: skip
    axes.set_title(title, fontsize="medium", pad=14)
    named = [*curves]
    if level not in curves:
        named.append(Curve(f"{level.name}, all", [(axes.get_xlim()[1], base)], "#666666"))
    _name_in_margin(axes, named)
    figure.savefig(path, dpi=150)


def in_units(size: float) -> str:
    """Write bytes in the largest unit that leaves at least one of it."""
    divisor, unit = next((entry for entry in UNITS if size >= entry[0]), UNITS[-1])
    return f"{size / divisor:.3g} {unit}"


def _name_in_margin(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write names beside the axes, each as near to the end of its curve as the others allow."""
    low, high = axes.get_ylim()
    ends = [curve.points[-1] for curve in curves]
    heights = spread([(y - low) / (high - low) for _, y in ends], LINE_HEIGHT)
    for curve, end, height in zip(curves, ends, heights, strict=True):
        axes.annotate(
            f"{curve.name}: {end[1]:.2f}", end, xytext=(MARGIN, height), textcoords="axes fraction",
            color=curve.color, fontsize=8, va="center", annotation_clip=False,
            arrowprops=LEADER | {"color": curve.color},
        )  # fmt: skip


def spread(wanted: Sequence[float], distance: float) -> list[float]:
    """Move heights apart until neighbours have a distance, inside 0 .. 1; those that are too near move as one."""
    order = np.argsort(wanted, kind="stable")
    groups: list[list[float]] = []  # ascending: the heights wanted by names that stand at even distances
    for place in order:
        groups.append([wanted[place]])
        while len(groups) > 1 and _bottom(groups[-1], distance) < _top(groups[-2], distance) + distance:
            last = groups.pop()
            groups[-1] += last
    placed = [_bottom(group, distance) + i * distance for group in groups for i in range(len(group))]
    heights = np.empty(len(placed))
    heights[order] = placed
    found: list[float] = heights.tolist()
    return found


def _bottom(group: Sequence[float], distance: float) -> float:
    """Return the lowest height of names that stand around the mean of those that they want."""
    span = distance * (len(group) - 1)
    return min(max(float(np.mean(group)) - span / 2, 0.0), 1.0 - span)


def _top(group: Sequence[float], distance: float) -> float:
    return _bottom(group, distance) + distance * (len(group) - 1)
