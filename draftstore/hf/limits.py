"""Limits on the size of a draft: end of the text, of the cache and of the model's positions; single chains.

Nodes beyond them are cut off before the pass, so that decoding can fill a static cache completely, and no node is
verified that could not be emitted.
"""

from collections.abc import Callable

import numpy as np

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Planner
from draftstore.hf.masks import shape_of
from draftstore.trees.chains import best_chain
from draftstore.trees.tree import DraftTree


class Limited:
    """A planner with limits.

    Attributes:
        planner: the planner within the limits.
    """

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
            planner: planner within the limits.
            nodes: maximum nodes of the next pass; None: unlimited.
            depth: maximum useful depth now; None: unlimited.
            chain: whether only a chain can be verified.
        """
        self.planner = planner
        self._nodes = nodes
        self._depth = depth
        self._chain = chain

    def begin(self) -> None:
        """Start a new text."""
        self.planner.begin()

    def budget(self) -> int:
        """Return the planner's budget, limited."""
        if self._nodes() == 0 or self._depth() == 0:
            return 0
        return self.planner.budget()

    def trim(self, tree: DraftTree) -> DraftTree:
        """Cut a tree to the limits, then to the planner's choice."""
        return self.planner.trim(self.cut(tree))

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a tree to the limits."""
        if len(tree):
            tree = cut_depth(tree, self._depth())
        if len(tree) and self._chain:
            tree = best_chain(tree)
        nodes = self._nodes()
        return tree if nodes is None or len(tree) <= nodes else tree.prefix(nodes)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        """Pass a draft's outcome on."""
        self.planner.learn(proposed, verified, accepted)


def cut_depth(tree: DraftTree, depth: int | None) -> DraftTree:
    """Return the nodes of a tree up to a depth."""
    if depth is None or depth >= len(tree):
        return tree
    chosen = shape_of(tree).offsets[1:] <= depth
    if bool(chosen.all()):
        return tree
    places = np.append(np.cumsum(chosen) - 1, -1).astype(np.int16)
    return DraftTree(tree.tokens[chosen], places[tree.parents[chosen]], tree.levels[chosen])
