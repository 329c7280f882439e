"""How large a draft may be: the end of the text, of the cache and of the model's positions, and one chain only.

What lies beyond is cut off before the pass, so that decoding goes on to the very end of a static cache, and no node is
verified that could not be emitted any more.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Planner
from draftstore.hf.masks import shape_of
from draftstore.trees.tree import DraftTree


class Limited:
    """A planner under limits."""

    def __init__(
        self,
        planner: Planner,
        *,
        nodes: Callable[[], int | None],
        depth: Callable[[], int | None],
        chain: bool = False,
    ) -> None:
        """Limit a planner.

        Args:
            planner: chooses under the limits.
            nodes: most nodes that a pass may have now; None for any number.
            depth: most tokens from the text to a node that are of use now; None for any number.
            chain: only one chain can be verified.
        """
        self._planner = planner
        self._nodes = nodes
        self._depth = depth
        self._chain = chain

    def begin(self) -> None:
        """Start a new text."""
        self._planner.begin()

    def budget(self) -> int:
        """Return the planner's budget, or less."""
        if self._nodes() == 0 or self._depth() == 0:
            return 0
        return self._planner.budget()

    def trim(self, tree: DraftTree) -> DraftTree:
        """Return what the planner chooses of a tree that is cut to the limits."""
        if len(tree):
            tree = cut_depth(tree, self._depth())
        if len(tree) and self._chain:
            tree = best_chain(tree)
        nodes = self._nodes()
        tree = tree if nodes is None or len(tree) <= nodes else tree.prefix(nodes)
        return self._planner.trim(tree)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Pass on how a draft fared."""
        self._planner.learn(proposed, verified, accepted)


def cut_depth(tree: DraftTree, depth: int | None) -> DraftTree:
    """Return the nodes of a tree that are at most `depth` tokens from the text."""
    if depth is None or depth >= len(tree):
        return tree
    return select(tree, shape_of(tree).offsets[1:] <= depth)


def best_chain(tree: DraftTree) -> DraftTree:
    """Return the path from the text to a leaf that promises most accepted tokens: the highest sum of probabilities."""
    parents = tree.parents.tolist()
    promise = [0.0] * (len(tree) + 1)  # of the best path below each node; the text stands last, as parent -1
    best = [-1] * (len(tree) + 1)
    for node in range(len(tree) - 1, -1, -1):
        value = float(tree.probs[node]) + promise[node]
        if value >= promise[parents[node]]:
            promise[parents[node]], best[parents[node]] = value, node
    chosen = np.zeros(len(tree), np.bool_)
    node = best[-1]
    while node >= 0:
        chosen[node] = True
        node = best[node]
    return select(tree, chosen)


def select(tree: DraftTree, chosen: Any) -> DraftTree:
    """Return some nodes of a tree.

    Args:
        tree: in canonical order.
        chosen: bool [n]; with a node its parent is chosen.
    """
    if bool(chosen.all()):
        return tree
    places = np.append(np.cumsum(chosen) - 1, -1).astype(np.int16)
    return DraftTree(tree.tokens[chosen], places[tree.parents[chosen]], tree.levels[chosen])
