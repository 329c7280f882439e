"""The interface of planners, which choose how much of a draft to verify, and the simplest one."""

from typing import Protocol

from draftstore.decoding.acceptance import Acceptance
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree, best_chain


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
    """The planner that verifies whole drafts, or the best chain of each, up to a budget."""

    def __init__(self, budget: int = BUDGET, chain: int | None = None) -> None:
        """Request up to `budget` nodes; with `chain`, verify a single path of at most that many nodes."""
        self._budget = budget
        self._chain = chain

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
