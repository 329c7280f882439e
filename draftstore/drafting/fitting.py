"""Adapters for models whose vocabulary is larger or smaller than a store's."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextSession, Drafter, StoreDrafter, projection_of
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree


def fitted(drafter: StoreDrafter, vocab_size: int) -> Drafter:
    """Adapt a store's drafter to a model of `vocab_size` ids."""
    return drafter if drafter.vocab_size == vocab_size else _Fitted(drafter, vocab_size)


class _Fitted:
    """A `ContextDrafter` for a model of another vocabulary: ids that only one side knows are hidden or removed."""

    def __init__(self, drafter: StoreDrafter, vocab_size: int) -> None:
        self._drafter = drafter
        self.context_size = drafter.context_size
        self.vocab_size = vocab_size
        self.projection = projection_of(drafter)

    def warm_up(self) -> None:
        self._drafter.warm_up()

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        known = np.where(contexts < self._drafter.vocab_size, contexts, np.int32(-1))
        drafts = self._drafter.draft(known, budget, min_prob, queries)
        return [draft._replace(tree=below(draft.tree, self.vocab_size)) for draft in drafts]

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_prefill: Any
    ) -> ContextSession:
        return ContextSession(self, prompt_ids, hidden)


def below(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return a draft without ids outside a vocabulary and their descendants."""
    if len(tree) == 0 or int(tree.tokens.max()) < vocab_size:
        return tree
    places = np.full(len(tree) + 1, -1, np.int64)  # new indices of the remaining nodes, after the context's
    nodes: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        if token < vocab_size and (parent < 0 or places[parent + 1] >= 0):
            places[node + 1] = len(nodes)
            nodes.append(node)
    return DraftTree(tree.tokens[nodes], places[tree.parents[nodes] + 1].astype(np.int16), tree.levels[nodes])
