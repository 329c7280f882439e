"""The time of a batch of rollouts, from accepted lengths that were replayed and passes that were measured.

All texts start together, each with its recorded length; a step yields to each text the tokens a pass that it reached in
its replay with as many nodes. The batch has ended when its last text has: in reinforcement learning, training waits for
it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.curve import CostCurve, Costs

BATCH = 64
WAYS = ("none", "16 nodes", "most tokens", "longest first")
"""No drafts; 16 nodes for each text; as many for each as give the most tokens a second (what the planner does); as many
as give the text with the most left the most, which no engine can know."""
DRAFTING = 25e-6
"""Seconds of one core to draft for a text of a batch, in series with its passes: measured with 256 texts."""
GPU = Path(__file__).parents[1] / "results/gpu/nvidia_h200_room.json"


def gpu_curve() -> CostCurve:
    """Return the costs of passes of the shape of Llama 3.1 8B that `benchmarks.gpu` measured on an H200."""
    cells = json.loads(GPU.read_text(encoding="utf-8"))["stages"]["curve"].values()
    seconds: dict[int, dict[int, float]] = {}
    for cell in cells:
        if "wall_ms" in cell:
            seconds.setdefault(cell["texts"], {})[cell["rows"]] = cell["wall_ms"] / 1000
    costs = [
        Costs(texts, tuple(sorted(each)), tuple(each[rows] for rows in sorted(each)))
        for texts, each in sorted(seconds.items())
        if 1 in each
    ]
    return CostCurve(costs[0].rows, costs[0].seconds, batches=tuple(costs[1:]))


def makespan(texts: Mapping[int, NDArray[np.float64]], curve: CostCurve, way: str) -> float:
    """Return the seconds until all texts have ended.

    Args:
        texts: tokens and passes of each text's replay, float64 [texts, 2], by the number of nodes.
        curve: seconds of passes.
        way: one of `WAYS`.
    """
    left = next(iter(texts.values()))[:, 0].copy()
    rates = {0: np.ones(len(left))} | {
        nodes: each[:, 0] / np.maximum(each[:, 1], 1) for nodes, each in texts.items()
    }
    seconds = 0.0
    while (running := left > 0).any():
        count, last = int(running.sum()), int(left.argmax())
        costs = {nodes: curve.cost(nodes + 1, count) + DRAFTING * count * (nodes > 0) for nodes in rates}
        if way == "none":
            nodes = 0
        elif way == "16 nodes":
            nodes = 16 if 16 in rates else max(rates)
        elif way == "most tokens":
            nodes = max(rates, key=lambda each: rates[each][running].sum() / costs[each])
        else:
            nodes = max(rates, key=lambda each: rates[each][last] / costs[each])
        left[running] -= rates[nodes][running]
        seconds += costs[nodes]
    return seconds
