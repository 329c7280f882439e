"""Drafters that use only the last tokens of a text, such as those of stores."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_states
from draftstore.drafting.slots import SlotDrafter, Slots, enlarged
from draftstore.drafting.sources import Prefill, Results, SlotSource, check_trees
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.frontier import BUDGET


class ContextDrafter(SlotDrafter, ABC):
    """A drafter that uses only the last tokens of a text and, if it is dense, the hidden state that predicted the last.

    Attributes:
        context_size: number of tokens that it uses.
        vocab_size: size of its vocabulary.
        hidden_size: size of a hidden state; 0 if the drafter is not dense.
    """

    context_size: int
    vocab_size: int
    hidden_size: int = 0

    @abstractmethod
    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        """Draft for a batch of contexts: all that a kind of drafter implements.

        Args:
            contexts: int32 [batch, size], the last tokens of each text, right-aligned and padded with -1; a negative
                id hides those before it.
            hidden: float16 [batch, hidden_size], the states that predicted the last tokens. A dense drafter returns
                empty drafts without them and for rows with non-finite values; others ignore them.

        Raises:
            DraftstoreError: the budget is outside 0 .. 4,096, contexts is not a matrix, or the hidden states have the
                wrong shape.
        """

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        """Draft like `draft_batch`, with an object for each draft."""
        return self.draft_batch(contexts, budget, min_prob, hidden).drafts()

    def open_source(self, slots: Slots) -> "ContextSource":
        """Return the contexts of texts in slots."""
        return ContextSource(self, slots)

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft."""
        nothing = np.full((1, self.context_size), -1, np.int32)
        self.draft_batch(nothing, hidden=np.full((1, self.hidden_size), np.nan, np.float16))


class ContextSource(SlotSource):
    """The last tokens of texts and, for a dense drafter, the states that predicted the last ones, NaN if unknown."""

    def __init__(self, drafter: ContextDrafter, slots: Slots) -> None:
        self._drafter, self._slots = drafter, slots
        self._size, self._hidden_size = drafter.context_size, drafter.hidden_size
        self.vocab_size = drafter.vocab_size
        self._states: NDArray[np.float16] = np.empty((0, self._hidden_size), np.float16)
        slots.need_context(self._size)

    def needs(self, slot: int) -> tuple[bool, bool]:  # noqa: ARG002
        """Return whether the drafter is dense; it needs no candidates."""
        return False, self._hidden_size > 0

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:  # noqa: ARG002
        """Start a text; see `SlotSource`."""
        if self._hidden_size:
            self._states = enlarged(self._states, self._slots.capacity)
            self._set_states(np.array([slot]), None if prefill.hidden is None else prefill.hidden[None])

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts in one call; see `SlotSource`."""
        contexts = self._slots.contexts[slots, -self._size :]
        states = self._states[slots] if self._hidden_size else None
        return check_trees(self._drafter.draft_batch(contexts, budget, min_prob, states), len(slots))

    def observe(self, places: NDArray[np.int64], results: Results) -> None:
        """Note the states of texts; see `SlotSource`."""
        if self._hidden_size:
            hidden = None if results.hidden is None else results.hidden[places]
            self._set_states(results.slots[places], hidden)

    def _set_states(self, slots: NDArray[np.int64], hidden: NDArray[np.floating[Any]] | None) -> None:
        self._states[slots] = np.nan
        if hidden is not None:
            self._states[slots] = check_states(hidden, len(slots), self._hidden_size)
