"""How much of a draft to verify: the planner that weighs expected tokens against the cost of a forward pass.

A pass over k nodes yields 1 + (accepted nodes) tokens and takes `curve.cost(k + 1)` seconds. Long-run throughput is
maximal if every pass maximises

    (1 + S_k) - rate * cost(k + 1)          S_k = sum of the acceptance probabilities of the first k nodes

where `rate` is that maximal throughput in tokens per second (Dinkelbach, "On nonlinear fractional programming", 1967).
The rate is estimated from accepted tokens and the curve, never from a clock: the same text and the same drafts give the
same plan. Curves have steps (a CPU takes half a pass more for 2 rows than for 1), so all k are tried.

The probabilities are the drafter's, calibrated by how its drafts fared in this text. That is learned from every draft,
verified or not: after a pass the next tokens are known, and with them which children along their path were right. So a
text that decodes plainly because of bad drafts notices when they become good. The sum of many small probabilities is
calibrated a second time, by the outcomes of such sums.

Calibration takes a few tokens, which could be expensive. So there is an account: speculation may lose half a plain pass
plus 2 % of the text so far; its gains are paid in. No text can take longer than that, however wrong its drafts are:
from 50 tokens on it decodes at 0.97 of plain speed at least, provided that the curve is right.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.calibration import (
    BANDS,
    LENGTH_BANDS,
    band_factors,
    best_prefix,
    count_lengths,
    count_outcomes,
    expect_tokens,
    length_factors,
    split_sum,
)
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Fixed, Planner
from draftstore.errors import DraftTreeError
from draftstore.jit import as_input
from draftstore.trees.tree import DraftTree

ALLOWANCE = 0.5
"""Plain passes that speculation may lose in a text."""
SHARE = 0.02
"""Fraction of the text so far that speculation may lose in addition."""
RATE_TRUST = 10.0
"""Weight of the plain decoding rate at the start of a text, in tokens."""
FORGETTING = 0.5 ** (1 / 300)
"""Decay of everything learned per token of text: one half after 300."""


class CostPlanner:
    """The planner that maximises throughput.

    Attributes:
        rate: estimated tokens per second for this text so far.
        account: seconds that speculation may still lose.
    """

    def __init__(self, curve: CostCurve, budget: int = 64) -> None:
        """Plan with the curve of the model on this device, for drafts of at most `budget` nodes."""
        self._budget = budget
        self._curve = curve
        self._costs = curve.costs(1, budget + 1)
        self._plain = float(self._costs[0])
        self.begin()
        self.trim(DraftTree.empty())  # compiles the kernel now, not during decoding

    def begin(self) -> None:
        """Start a new text: nothing is carried over, so that no text pays for another, nor shared with a copy."""
        self._seen = np.zeros((2, BANDS, 2))
        self._lengths, self._expected = np.zeros((LENGTH_BANDS, 2)), np.zeros(LENGTH_BANDS)
        self._tokens, self._seconds = RATE_TRUST, RATE_TRUST * self._plain
        self.rate = 1 / self._plain
        self.account = ALLOWANCE * self._plain
        self._batch_seconds: tuple[float, float] | None = None

    def budget(self) -> int:
        """Return the maximum nodes of a draft."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix that is worth its cost; DraftTreeError if a parent does not precede its child."""
        tree = tree if len(tree) <= self._budget else tree.prefix(self._budget)
        size = best_prefix(*self._inputs(tree), self._costs, self.rate, self.account, self._expected)
        _require_order(tree, size)
        return tree.prefix(size)

    def _inputs(self, tree: DraftTree) -> tuple[Any, ...]:
        """Return a tree and its calibration as the kernels take them."""
        return (
            as_input(tree.parents, np.int16),
            as_input(tree.levels, np.uint8),
            band_factors(self._seen),
            length_factors(self._lengths),
        )

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn from a pass's outcome, for the whole draft."""
        count = len(accepted.tokens)
        count_outcomes(
            as_input(proposed.tokens, np.int32),
            as_input(proposed.parents, np.int16),
            as_input(proposed.levels, np.uint8),
            as_input(accepted.tokens, np.int32),
            self._seen,
        )
        if len(verified):
            count_lengths(self._expected, len(accepted.path), self._lengths)
        alone = float(self._costs[min(len(verified), self._budget)]), self._plain
        seconds, plain = self._batch_seconds or alone
        self._batch_seconds = None
        decay = FORGETTING**count
        self._seen *= decay
        self._lengths *= decay
        self._tokens = self._tokens * decay + count
        self._seconds = self._seconds * decay + seconds
        self.rate = max(self._tokens / self._seconds, 1 / plain)
        self.account += count * plain * (1 + SHARE) - seconds

    @staticmethod
    def trim_together(planners: "Sequence[CostPlanner]", trees: Sequence[DraftTree]) -> list[DraftTree]:
        """Return the prefixes of several texts' drafts that are worth the cost of one pass over all of them.

        Every text has the rows of the largest draft, used or not. So one number of nodes is chosen for all, by the sum
        of what they expect, at the rate and within the account of all texts together; all have the same curve.
        """
        texts, most = len(planners), max(planner._budget for planner in planners)
        trees = [
            tree.prefix(min(len(tree), each._budget)) for each, tree in zip(planners, trees, strict=True)
        ]
        widest = max(len(tree) for tree in trees)
        costs = _batch_costs(planners[0]._curve, texts, most + 1)
        gains, sums = np.zeros(widest + 1), np.zeros((texts, widest + 1))
        tokens = np.empty(widest + 1)
        for planner, tree, own in zip(planners, trees, sums, strict=True):
            size = len(tree)
            fault = expect_tokens(*planner._inputs(tree), tokens[: size + 1], own[: size + 1])
            _require_order(tree, fault)
            gains[: size + 1] += tokens[: size + 1]
            gains[size + 1 :] += tokens[size]
        emitted, seconds = (sum(getattr(each, name) for each in planners) for name in ("_tokens", "_seconds"))
        extra = costs[: widest + 1] - costs[0]
        worth = gains - max(emitted / seconds, texts / costs[0]) * extra
        worth[extra > max(0.0, sum(planner.account for planner in planners))] = -np.inf
        chosen = int(np.argmax(worth))  # the first, so the fewest nodes, among ties
        for planner, tree, own in zip(planners, trees, sums, strict=True):
            split_sum(own[min(chosen, len(tree))], planner._expected)
            planner._batch_seconds = float(costs[chosen]) / texts, float(costs[0]) / texts
        return [tree.prefix(min(chosen, len(tree))) for tree in trees]


@functools.lru_cache(maxsize=256)
def _batch_costs(curve: CostCurve, texts: int, most: int) -> NDArray[np.float64]:
    return curve.costs(texts, most)


def _require_order(tree: DraftTree, fault: int) -> None:
    """Refuse a tree in which a kernel found a fault, -i - 1 for node i."""
    if fault < 0:
        raise DraftTreeError(
            f"node {-fault - 1} has parent {tree.parents[-fault - 1]}, expected an earlier node"
        )


def trim_together(planners: Sequence[Planner], trees: Sequence[DraftTree]) -> list[DraftTree]:
    """Return how much of each draft to verify in one pass over several texts; those of one curve choose together."""
    costed = [planner for planner in planners if isinstance(planner, CostPlanner)]
    if len(costed) == len(planners) > 1 and len({planner._curve for planner in costed}) == 1:
        return CostPlanner.trim_together(costed, trees)
    return [planner.trim(tree) for planner, tree in zip(planners, trees, strict=True)]


def capped(planner: Planner, budget: int | None) -> Planner:
    """Return a planner for drafts of at most `budget` nodes, if given."""
    if budget is None:
        return planner
    if isinstance(planner, CostPlanner):
        lower = copy.copy(planner)
        lower._budget = min(planner._budget, budget)
        return lower
    return Fixed(min(planner.budget(), budget))
