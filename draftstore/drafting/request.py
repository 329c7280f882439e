"""Drafts from the request itself: tokens that followed earlier occurrences of the last tokens in prompt and output.

    prompt and output     Rename x to y : x = f ( x ) => y = f
    the last token `f` occurred before, and so did `= f`, followed by `(`, then `x )`

The tree grows best-first by the rule of `draftstore.search.expand`, with the text itself instead of a store.
Occurrences end before the last token, which has no successor yet.

**The cost does not grow with the text**, which is indexed by `draftstore.drafting.history`: the last 1, 2, 4 and 8
tokens are keys of lists of earlier occurrences, latest first.

- Appending k tokens takes 4 k table operations; full arrays are enlarged by half and rebuilt.
- A node reads the last 32 occurrences in each list and compares at most 32 tokens of each. So older occurrences of a
  frequent token count only as part of a longer match.
- A draft expands no more nodes than it has, and copies at most the last 32 tokens of the text.
- A long session takes 36 to 78 bytes per token.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget, check_ids
from draftstore.drafting.history import (
    LENGTHS,
    SIZE,
    History,
    HistoryRule,
    append_texts,
    draft_texts,
)
from draftstore.drafting.slots import SlotDrafter, Slots, enlarged
from draftstore.drafting.sources import Prefill, Results, SlotSource
from draftstore.errors import require_vocabulary
from draftstore.jit import read_only
from draftstore.trees.batch import DraftBatch

SPARE = 1024
"""Spare room after a new text's prompt in tokens, in addition to a quarter of the prompt."""
NO_CONTEXT = read_only(np.empty((0, 0), np.int32))
FIRST: NDArray[np.int64] = read_only(np.zeros(1, np.int64))


class RequestDrafter(SlotDrafter):
    """Drafts from each text's own history; texts share nothing."""

    def __init__(
        self, vocab_size: int, rule: HistoryRule | None = None, *, prediction: ArrayLike | None = None
    ) -> None:
        """Draft for texts with ids in [0, vocab_size).

        Args:
            prediction: int32 [any], the expected continuation of the prompt: drafts begin with it, and return to it
                whenever the text does.

        Raises:
            DraftstoreError: an empty vocabulary, or a rule with an invalid value.
        """
        require_vocabulary(vocab_size)
        self.rule = HistoryRule() if rule is None else rule
        self.rule.check()
        self.vocab_size = vocab_size
        self.prediction = check_ids(() if prediction is None else prediction, vocab_size, parts=True)

    @property
    def source(self) -> Hashable:
        """Key shared by drafters with the same rule."""
        return RequestDrafter, self.vocab_size, self.rule

    def open_source(self, slots: Slots) -> "RequestSource":
        """Return the histories of texts in slots."""
        return RequestSource(self.vocab_size, self.rule, slots)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        self.session([0, 0]).propose(1)


class RequestSource(SlotSource):
    """The histories of texts, each in arrays of its own, so that one that outgrows its room copies no other."""

    def __init__(self, vocab_size: int, rule: HistoryRule, slots: Slots) -> None:
        self.vocab_size = vocab_size
        self._rule = read_only(np.array(rule, np.float64))
        self._slots = slots
        self._histories: dict[int, History] = {}
        self._table = np.zeros((0, len(History.new(1).row())), np.int64)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose arrays lie elsewhere."""
        self.__dict__.update(state)
        for slot, history in self._histories.items():
            self._table[slot, :SIZE] = history.row()[:SIZE]

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        """Index a text."""
        ids = prefill.ids
        if len(drafter.prediction):
            # As if the same prompt had been answered before: its end leads to the prediction. The last id is the
            # first of the answer.
            ids = np.concatenate([ids[-1 - LENGTHS[-1] : -1], drafter.prediction, ids], dtype=np.int32)
        self._table = enlarged(self._table, self._slots.capacity)
        self._begin(slot, ids, len(ids) + len(ids) // 4 + SPARE)

    def leave(self, slot: int) -> None:
        """Free the arrays of a text."""
        self._histories.pop(slot, None)

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts; see `SlotSource`."""
        level = check_budget(budget, min_prob)
        return DraftBatch(*draft_texts(self._table, slots, NO_CONTEXT, self._rule, budget, level))

    def observe(self, places: NDArray[np.int64], results: Results) -> None:
        """Append ids to texts; see `SlotSource`."""
        new = results.slots, results.ids, results.stops
        done = append_texts(self._table, 0, places, *new)
        while done < len(places):
            place = int(places[done])
            slot = int(results.slots[place])
            text = self._histories[slot].tokens[: self._table[slot, SIZE]]
            self._begin(slot, text, (len(text) + len(results.new(place))) * 3 // 2)
            done = append_texts(self._table, done, places, *new)

    def _begin(self, slot: int, ids: NDArray[np.int32], capacity: int) -> None:
        """Index a text anew in arrays of its own."""
        history = History.new(capacity)
        self._table[slot] = history.row()
        append_texts(self._table, 0, FIRST, np.array([slot]), read_only(ids), np.array([len(ids)]))
        self._histories[slot] = history
