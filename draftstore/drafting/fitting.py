"""A store's drafter as a source for a model: the vocabularies may differ, and the files may be truncated."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET

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

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        """Draft for a batch of contexts; see `ContextDrafter.draft_batch`."""
        if not self._disabled and (why := self._damage()) is not None:
            LOG.warning("a source of drafts is disabled: %s", why)
            self._disabled = True
        if self._disabled:
            return DraftBatch.empty(len(contexts))
        if self.vocab_size == self._drafter.vocab_size:
            return self._drafter.draft_batch(contexts, budget, min_prob, hidden)
        known = np.where(contexts < self._drafter.vocab_size, contexts, np.int32(-1))
        return _below(self._drafter.draft_batch(known, budget, min_prob, hidden), self.vocab_size)


def _below(drafts: DraftBatch, vocab_size: int) -> DraftBatch:
    """Return drafts without ids outside a vocabulary and their descendants."""
    batch, width = drafts.tokens.shape
    nodes = np.arange(width) < drafts.sizes[:, None]
    known = nodes & (drafts.tokens < vocab_size)
    if (known == nodes).all():
        return drafts
    kept = np.append(known, np.ones((batch, 1), np.bool_), axis=1)  # the last column, -1, is the context
    parents = np.where(nodes, drafts.parents, np.int16(-1))
    for node in range(width):
        kept[:, node] &= kept[np.arange(batch), parents[:, node]]
    places = np.cumsum(kept, axis=1, dtype=np.int16) - np.int16(1)
    places[:, -1] = -1
    above = np.take_along_axis(places, parents, axis=1)
    order = np.argsort(~kept[:, :-1], axis=1, kind="stable")
    trees: Any = (np.take_along_axis(rows, order, axis=1) for rows in (drafts.tokens, above, drafts.levels))
    tokens, parents, levels = trees
    sizes = kept[:, :-1].sum(axis=1, dtype=np.int32)
    return drafts._replace(tokens=tokens, parents=parents, levels=levels, sizes=sizes)
