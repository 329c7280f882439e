"""A store's drafter as a source for a model: the vocabularies may differ, and the files may be truncated."""

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.trees.batch import Draft
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)


class FittedDrafter(ContextDrafter):
    """A `ContextDrafter` for a model of `vocab_size` ids: ids that only one side knows are hidden or removed.

    A store that is damaged while it is open is no longer queried: its drafts are empty, and the log says why.
    """

    def __init__(
        self, drafter: ContextDrafter, vocab_size: int, damage: Callable[[], str | None] = lambda: None
    ) -> None:
        """Adapt a store's drafter; `damage` returns why the store can no longer be read, or None if it can."""
        self._drafter = drafter
        self._damage = damage
        self._disabled = False
        self.context_size = drafter.context_size
        self.vocab_size = vocab_size
        self.hidden_size = drafter.hidden_size

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft."""
        self._drafter.warm_up()

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`."""
        if not self._disabled and (why := self._damage()) is not None:
            LOG.warning("a source of drafts is disabled: %s", why)
            self._disabled = True
        if self._disabled:
            return [Draft(DraftTree.empty(), 0, 0)] * len(contexts)
        if self.vocab_size == self._drafter.vocab_size:
            return self._drafter.draft(contexts, budget, min_prob, hidden)
        known = np.where(contexts < self._drafter.vocab_size, contexts, np.int32(-1))
        drafts = self._drafter.draft(known, budget, min_prob, hidden)
        return [draft._replace(tree=_below(draft.tree, self.vocab_size)) for draft in drafts]


def _below(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return a draft without ids outside a vocabulary and their descendants."""
    if len(tree) == 0 or int(tree.tokens.max()) < vocab_size:
        return tree
    places = np.full(
        len(tree) + 1, -1, np.int64
    )  # new indices of the remaining nodes, after that of the context
    nodes: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if token < vocab_size and (parent < 0 or places[parent + 1] >= 0):
            places[node + 1] = len(nodes)
            nodes.append(node)
    return DraftTree(tree.tokens[nodes], places[tree.parents[nodes] + 1].astype(np.int16), tree.levels[nodes])
