"""How much of a draft to verify: planners, of which `CostPlanner` takes what yields the most tokens per second.

A pass over k nodes of a draft yields 1 + (accepted nodes) tokens and takes `curve.cost(k + 1)` seconds. The planner
verifies the first k nodes, with the k that maximises

    (1 + S_k) / cost(k + 1)          S_k = sum of the acceptance probabilities of the first k nodes

All k are tried, since curves have steps: on a CPU, a pass takes 50 % longer for 2 rows than for 1.

The probabilities are the drafter's, corrected by its drafts in this text. For each band of probabilities given the
parent, an octave wide, a factor is learned: the posterior mean of actual by expected acceptances, under a sceptical
prior of half of what the drafter claims. It is learned from every draft, verified or not, since after a pass the next
tokens are known: a drafter must prove itself before its drafts cost anything, and good ones are soon noticed.

Costs come from the curve, never from a clock: the same text and the same drafts give the same plan.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.curve import CostCurve
from draftstore.errors import DraftTreeError
from draftstore.jit import as_input, kernel, leaf_kernel
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import LEVEL_PROBS, LEVELS_PER_OCTAVE, DraftTree, best_chain, steps_below, walk

BANDS = 6
"""Bands of probabilities given the parent, an octave each; the last one includes all lower values."""
PRIOR: NDArray[np.float64] = np.array([[2.0], [1.0]])
"""Initial expected and actual acceptances of every band: half of the expected ones happened."""
FORGETTING = 0.5 ** (1 / 300)
"""Decay of everything learned, per token of text: one half after 300."""
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


class Planner(Protocol):
    """Chooses how much of a draft to verify."""

    def begin(self) -> None:
        """Start a new text."""

    def budget(self) -> int:
        """Return the maximum useful nodes of a draft; 0 skips drafting."""

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix of a tree to verify."""

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn from a draft's outcome."""


class Fixed:
    """The planner that verifies whole drafts, or the best chain of each, up to a number of nodes."""

    def __init__(self, budget: int = BUDGET, chain: int | None = None) -> None:
        self._budget, self._chain = budget, chain

    def begin(self) -> None:
        """Do nothing."""

    def budget(self) -> int:
        """Return the maximum nodes."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the tree, cut to the budget and, if requested, to a chain."""
        tree = tree if len(tree) <= self._budget else tree.prefix(self._budget)
        return tree if self._chain is None else best_chain(tree, self._chain)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Learn nothing."""


class CostPlanner:
    """The planner that maximises tokens per second, by the curve of the model on this device."""

    def __init__(self, curve: CostCurve, budget: int = BUDGET) -> None:
        self._curve, self._budget = curve, budget
        self.begin()
        self.trim(DraftTree.empty())  # compile the kernel now, not during decoding

    def begin(self) -> None:
        """Start a new text; nothing is carried over, so texts do not affect each other."""
        self._seen = np.zeros((2, BANDS))  # expected and actual acceptances

    def budget(self) -> int:
        """Return the maximum nodes of a draft."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix worth its cost; see `trim_together`."""
        return trim_together([self], [tree])[0]

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:  # noqa: ARG002
        """Compare the draft's claims about each new token of the text with the actual tokens."""
        ids, tokens = as_input(accepted.tokens, np.int32), as_input(proposed.tokens, np.int32)
        _compare(ids, tokens, *_shape(proposed), self._seen)
        self._seen *= FORGETTING ** len(accepted.tokens)


def _shape(tree: DraftTree) -> tuple[NDArray[Any], NDArray[Any]]:
    return as_input(tree.parents, np.int16), as_input(tree.levels, np.uint8)


@kernel
def _compare(ids, tokens, parents, levels, seen):
    """Count in `seen` the expected acceptances of the children along the next tokens, and the actual ones."""
    walk(tokens, parents, ids, count_claims, (parents, levels, seen))


@leaf_kernel
def count_claims(state, node, child):
    """Count the expected acceptances of a node's children, and that of the next node, in float64 [2, BANDS]."""
    parents, levels, seen = state
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            steps = steps_below(levels, i, node)
            band = min(steps // LEVELS_PER_OCTAVE, BANDS - 1)
            seen[0, band] += _PROBS[steps]
            seen[1, band] += i == child


@leaf_kernel
def chance_of(parents, levels, factors, chances, node):
    """Return the acceptance probability of a node, whose parent's is known; `factors`: float64 [BANDS]."""
    parent = np.int64(parents[node])
    steps = steps_below(levels, node, parent)
    factor = factors[min(steps // LEVELS_PER_OCTAVE, BANDS - 1)]
    return min(1.0, _PROBS[steps] * factor) * (chances[parent] if parent >= 0 else 1.0)


@kernel
def _add_expected(parents, levels, factors, tokens):
    """Add the expected accepted tokens of the first 0, 1, ... nodes; return a node that precedes its parent, or -1."""
    chances, total = np.empty(len(parents)), 0.0
    for i in range(len(tokens) - 1):
        if i < len(parents):
            parent = np.int64(parents[i])
            if parent < -1 or parent >= i:
                return i
            chances[i] = chance_of(parents, levels, factors, chances, i)
            total += chances[i]
        tokens[i + 1] += total
    return -1


@functools.lru_cache(maxsize=256)
def _costs(curve: CostCurve, texts: int, most: int) -> NDArray[np.float64]:
    return curve.costs(texts, most)


def trim_together(planners: Sequence[Planner], trees: Sequence[DraftTree]) -> list[DraftTree]:
    """Return how much of each draft to verify in one pass over the texts of a batch.

    Every text takes the rows of the largest draft, used or not. So one number of nodes is chosen for all, from the sum
    of their expectations and the first one's curve, which is that of the model. Other planners choose for each text
    separately. DraftTreeError if a parent does not precede its child.
    """
    costed = [planner for planner in planners if isinstance(planner, CostPlanner)]
    if not costed or len(costed) < len(planners):
        return [planner.trim(tree) for planner, tree in zip(planners, trees, strict=True)]
    drafts = [tree.prefix(planner._budget) for planner, tree in zip(costed, trees, strict=True)]
    tokens = np.full(1 + max(map(len, drafts)), float(len(drafts)))
    for planner, draft in zip(costed, drafts, strict=True):
        expected, actual = planner._seen + PRIOR
        fault = _add_expected(*_shape(draft), actual / expected, tokens)
        if fault >= 0:
            raise DraftTreeError(f"node {fault} has parent {draft.parents[fault]}, expected an earlier node")
    most = max(planner._budget for planner in costed)
    seconds = _costs(costed[0]._curve, len(drafts), most + 1)[: len(tokens)]
    chosen = int(np.argmax(tokens / seconds))  # ties: the first, so the fewest nodes
    return [draft.prefix(chosen) for draft in drafts]


def capped(planner: Planner, budget: int | None) -> Planner:
    """Return a planner whose drafts have at most `budget` nodes; the same planner if that is None."""
    if budget is None:
        return planner
    lower = min(planner.budget(), budget)
    return CostPlanner(planner._curve, lower) if isinstance(planner, CostPlanner) else Fixed(lower)
