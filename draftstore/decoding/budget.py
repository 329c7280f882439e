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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, check_tree
from draftstore.decoding.curve import CostCurve
from draftstore.jit import as_input, kernel, leaf_kernel
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import LEVEL_PROBS, LEVELS_PER_OCTAVE, DraftTree, best_chain, steps_below, walk

BANDS = 6
"""Bands of probabilities given the parent, an octave each; the last one includes all lower values."""
PRIOR: NDArray[np.float64] = np.array([[2.0], [1.0]])
"""Initial expected and actual acceptances of every band: half of the expected ones happened."""
FORGETTING = 0.5 ** (1 / 300)
"""Decay of everything learned, per token of text: one half after 300."""
ONE = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int16), np.zeros(1, np.uint8))
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
        self.learn(
            ONE, ONE, Acceptance([], np.zeros(1, np.int32))
        )  # compile kernels now, not during decoding
        self.trim(ONE)
        self.begin()

    def begin(self) -> None:
        """Start a new text; nothing is carried over, so texts do not affect each other."""
        self._seen = np.zeros((2, BANDS))  # expected and actual acceptances

    def budget(self) -> int:
        """Return the maximum nodes of a draft."""
        return self._budget

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return the prefix worth its cost, see `trim_together`; DraftTreeError as from `check_tree`."""
        check_tree(tree)
        return trim_together([self], DraftBatch.of_trees([tree])).trees()[0]

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:  # noqa: ARG002
        """Compare the draft's claims about each new token of the text with the actual tokens."""
        none = DraftBatch.empty(1)
        ids = as_input(accepted.tokens, np.int32)
        learn_together([self], DraftBatch.of_trees([proposed]), none, [accepted], ids, np.array([len(ids)]))


@kernel
def _compare(ids, stops, tokens, parents, levels, sizes, seen):
    """Count in `seen`, float64 [texts, 2, BANDS], what drafts claimed of the tokens that came, and what happened."""
    start = np.int64(0)
    for text in range(len(stops)):
        size, came = np.int64(sizes[text]), ids[start : stops[text]]
        state = parents[text, :size], levels[text, :size], seen[text]
        walk(tokens[text, :size], parents[text, :size], came, count_claims, state)
        seen[text] *= FORGETTING ** np.float64(len(came))
        start = stops[text]


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
def _expect(parents, levels, sizes, budgets, seen):
    """Return the expected tokens of all texts with the first 0, 1, ... nodes of each."""
    texts, width = parents.shape
    tokens, chances, factors = np.full(width + 1, np.float64(texts)), np.empty(width), np.empty(BANDS)
    most = np.int64(0)
    for text in range(texts):
        total, size = 0.0, min(np.int64(sizes[text]), budgets[text])
        most = max(most, size)
        for band in range(BANDS):
            factors[band] = (seen[text, 1, band] + PRIOR[1, 0]) / (seen[text, 0, band] + PRIOR[0, 0])
        for node in range(width):
            if node < size:
                chances[node] = chance_of(parents[text], levels[text], factors, chances, node)
                total += chances[node]
            tokens[node + 1] += total
    return tokens[: most + 1]


@functools.lru_cache(maxsize=256)
def _costs(curve: CostCurve, texts: int, most: int) -> NDArray[np.float64]:
    return curve.costs(texts, most)


def trim_together(planners: Sequence[Planner], drafts: DraftBatch) -> DraftBatch:
    """Return how much of each draft, a valid tree, to verify in one pass over the texts of a batch.

    Every text takes the rows of the largest draft, used or not. So one number of nodes is chosen for all, from the sum
    of their expectations and the first one's curve, which is that of the model. Other planners choose for each text
    separately.
    """
    if not drafts.tokens.size:
        return drafts
    if all(type(planner) is Fixed and planner._chain is None for planner in planners):
        most = [planner.budget() for planner in planners]
        return drafts._replace(sizes=np.minimum(drafts.sizes, most).astype(np.int32))
    costed = _all_costed(planners)
    if costed is None:
        trees = zip(planners, drafts.trees(), strict=True)
        return DraftBatch.of_trees([planner.trim(tree) for planner, tree in trees], drafts.reason)
    budgets = np.array([planner._budget for planner in costed])
    tokens = _expect(*drafts.inputs()[1:], budgets, _seen(costed))
    seconds = _costs(costed[0]._curve, len(costed), int(budgets.max()) + 1)[: len(tokens)]
    chosen = int(np.argmax(tokens / seconds))  # ties: the first, so the fewest nodes
    return drafts._replace(sizes=np.minimum(np.minimum(drafts.sizes, budgets), chosen).astype(np.int32))


def learn_together(
    planners: Sequence[Planner],
    proposed: DraftBatch,
    verified: DraftBatch,
    accepted: Sequence[Acceptance],
    ids: NDArray[np.int32],
    stops: NDArray[np.int64],
) -> dict[int, Exception]:
    """Let planners learn what became of drafts, see `Planner.learn`; return errors by text.

    `ids`, int32 [any], are the accepted tokens of all texts, one after another; `stops`, int64 [batch], their ends.
    """
    errors = dict[int, Exception]()
    if all(type(planner) is Fixed for planner in planners):
        return errors
    costed = _all_costed(planners)
    if costed is None:
        outcomes = zip(planners, proposed.trees(), verified.trees(), accepted, strict=True)
        for place, (planner, offered, tree, each) in enumerate(outcomes):
            try:
                planner.learn(offered, tree, each)
            except Exception as error:  # noqa: BLE001 (of this text alone)
                errors[place] = error
        return errors
    seen = _seen(costed)
    _compare(as_input(ids, np.int32), as_input(stops, np.int64), *proposed.inputs(), seen)
    for planner, own in zip(costed, seen, strict=True):
        planner._seen = own
    return errors


def _all_costed(planners: Sequence[Planner]) -> Sequence[CostPlanner] | None:
    """Return planners that all go by the cost; None if one does not, or is of a class derived from it."""
    costed = [planner for planner in planners if type(planner) is CostPlanner]
    return costed if len(costed) == len(planners) else None


def _seen(planners: Sequence[CostPlanner]) -> NDArray[np.float64]:
    """Return what planners have learned, float64 [planners, 2, BANDS]."""
    return np.array([planner._seen for planner in planners])


def capped(planner: Planner, budget: int | None) -> Planner:
    """Return a planner whose drafts have at most `budget` nodes; the same planner if that is None."""
    if budget is None:
        return planner
    lower = min(planner.budget(), budget)
    return CostPlanner(planner._curve, lower) if isinstance(planner, CostPlanner) else Fixed(lower)
