"""Calibration of drafts: predicted probabilities against outcomes, in bins of equal width.

    reliability = Reliability()
    for step, coming in steps_of(drafter, recording, budget=64):
        reliability.add(step.tree, coming)
    reliability.summary()["path"]["ece"]

Two questions about a drafted node: whether the text follows the whole path to it (`path`: the probability in the tree)
and, if the text has followed the path to its parent, whether it continues with the node (`given parent`: the node's
probability divided by its parent's). The expected calibration error of either is the mean distance between prediction
and outcome over the bins, weighted by nodes. `promised` is the sum of predictions divided by that of outcomes.

Nodes beyond the end of the text are ignored: their outcomes are unknown.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.budget import Fixed
from draftstore.decoding.loop import Step, Text, decode
from draftstore.decoding.replay import RecordedModel, Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import start
from draftstore.trees.tree import DraftTree

BINS = 20


def steps_of(drafter: Drafter, recording: Recording, budget: int) -> Iterator[tuple[Step, NDArray[np.int32]]]:
    """Replay an output; yield every step, and the tokens, int32 [any], that follow its context in the text."""
    output = recording.output
    if len(output) < 2:
        return
    session = start(drafter, np.concatenate([recording.prompt, output[:1]]))
    model = RecordedModel(output)
    place = 1
    for step in decode(model, Text(session, Fixed(budget), model.ends)):
        yield step, output[place:]
        place += len(step.tokens)


class Reliability:
    """Predictions and outcomes of drafted nodes, in bins.

    Attributes:
        sums: float64 [2, BINS, 3], sums of nodes, predictions and outcomes, for paths and nodes given their parents.
    """

    def __init__(self, sums: NDArray[np.float64] | None = None) -> None:
        """Start with no nodes, or with these sums."""
        self.sums = np.zeros((2, BINS, 3)) if sums is None else sums

    def add(self, tree: DraftTree, coming: NDArray[np.int32]) -> None:
        """Judge a draft.

        Args:
            tree: the draft.
            coming: int32 [any], the text after its context.
        """
        taken = np.zeros(len(tree) + 1, np.bool_)  # the last one is the context, which is node -1
        taken[tree.accepted(coming)] = taken[-1] = True
        known = tree.depths <= len(coming)
        probs, parents = np.append(tree.probs.astype(np.float64), 1.0), tree.parents.astype(np.int64)
        reached = known & taken[parents]
        conditional = probs[:-1] / probs[parents]
        self._count(0, probs[:-1][known], taken[:-1][known])
        self._count(1, conditional[reached], taken[:-1][reached])

    def _count(self, question: int, predicted: NDArray[np.float64], outcomes: NDArray[np.bool_]) -> None:
        """Add nodes to the bins of one question."""
        places = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
        for column, weights in enumerate((None, predicted, outcomes)):
            self.sums[question, :, column] += np.bincount(places, weights, BINS)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return error, promise and bins of both questions as JSON values.

        A bin is nodes, mean prediction, share of outcomes; empty bins are omitted.
        """
        return {name: _summary(sums) for name, sums in zip(("path", "given parent"), self.sums, strict=True)}


def _summary(sums: NDArray[np.float64]) -> dict[str, Any]:
    """Return error, promise and bins of one question; see `Reliability.summary`."""
    filled = sums[sums[:, 0] > 0]
    nodes, predicted, outcomes = sums.sum(axis=0)
    return {
        "ece": round(float(np.abs(filled[:, 1] - filled[:, 2]).sum() / max(nodes, 1.0)), 4),
        "promised": round(float(predicted / outcomes), 3) if outcomes else None,
        "bins": [
            [int(count), round(prediction / count, 4), round(outcome / count, 4)]
            for count, prediction, outcome in filled.tolist()
        ],
    }
