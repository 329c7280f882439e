"""Recall: drafts from earlier answers to the same prompt, such as the rollouts of reinforcement learning.

    drafter = RecallDrafter(live_store, vocab_size)
    session = drafter.session(prompt_ids)

Texts with one prompt share one index (`draftstore.drafting.history`) of the latest answers to it, those of the newest
version preferred. It costs a fraction of what drafts from the whole memory cost, for answers to other prompts are not
searched. When an answer to the prompt ends, running texts draft from it in their next step.
"""

from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_budget
from draftstore.drafting.history import SIZE, History, append_tokens, draft_texts
from draftstore.drafting.slots import SlotDrafter, Slots, enlarged
from draftstore.drafting.sources import Prefill, Results, SlotSource
from draftstore.errors import require_limits
from draftstore.jit import as_input, read_only
from draftstore.live.directory import ANSWERS, TOKENS, Cursor
from draftstore.live.log import hash_prompt
from draftstore.live.memory import CONTEXT_SIZE, END, RULES
from draftstore.trees.batch import DraftBatch

FRESH_SECONDS = 1.0
"""Age of an index at which another text of its prompt makes it anew, since other processes may have answered."""
BEGIN: Cursor = (-1, -1)


class Answers(Protocol):
    """A live store that finds answers by their prompt, of this process or of the lookup service."""

    def recall(self, prompt: int, count: int) -> Sequence[NDArray[np.int32]] | None:
        """Return the latest answers to a prompt, by its hash, newest last, int32 [any] each; None: unknown now."""

    def changed(self, since: Cursor) -> tuple[Cursor, set[int] | None]:
        """Return a cursor, and the prompts with new answers since another one; None: any may have changed."""


class RecallDrafter(SlotDrafter):
    """Drafts from the latest answers to the text's own prompt."""

    def __init__(self, store: Answers, vocab_size: int, answers: int = ANSWERS) -> None:
        """Draft from at most so many answers of a store, 1 to 16; DraftstoreError for other numbers."""
        require_limits("recall", {"answers": (answers, 1, ANSWERS)})
        self.store, self.vocab_size, self.answers = store, vocab_size, answers

    def open_source(self, slots: Slots) -> "RecallSource":
        """Return the indexes of prompts of texts in slots."""
        return RecallSource(self, slots)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        session = self.session([0, 0])
        session.propose(1)


class _Index(NamedTuple):
    history: History
    size: int
    made: float

    @classmethod
    def of(cls, answers: Sequence[NDArray[np.int32]]) -> "_Index":
        """Index answers, separated and cut to the latest tokens."""
        parts = [part for answer in answers for part in (answer, END)]
        ids = np.concatenate([*parts, END[:0]])[-TOKENS:]
        history = History.new(max(1, len(ids)))
        return cls(history, append_tokens(*history, 0, as_input(ids, np.int32)), monotonic())


class RecallSource(SlotSource):
    """One index for each prompt, dropped when no text has that prompt any more."""

    def __init__(self, drafter: RecallDrafter, slots: Slots) -> None:
        self.vocab_size = drafter.vocab_size
        self._store, self._answers, self._slots = drafter.store, drafter.answers, slots
        self._rule = read_only(np.array(RULES["sole"], np.float64))
        self._prompts: dict[int, int] = {}
        self._indexes: dict[int, _Index] = {}
        self._table = np.zeros((0, SIZE + 1), np.int64)
        self._seen, _ = self._store.changed(BEGIN)
        slots.need_context(CONTEXT_SIZE)

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:  # noqa: ARG002
        """Recall the answers to a prompt, unless that was done a moment ago, for another text."""
        size = len(prefill.ids) - 1 if prefill.prompt_size is None else prefill.prompt_size
        prompt = self._prompts[slot] = hash_prompt(prefill.ids[:size])
        self._table = enlarged(self._table, self._slots.capacity)
        known = self._indexes.get(prompt)
        if known is not None and monotonic() - known.made < FRESH_SECONDS:
            self._point(slot, known)
        else:
            self._load(prompt)

    def leave(self, slot: int) -> None:
        """Drop the index of a text's prompt if it is the last."""
        prompt = self._prompts.pop(slot, None)
        if prompt is not None and prompt not in self._prompts.values():
            self._indexes.pop(prompt, None)

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts; see `SlotSource`."""
        self._seen, prompts = self._store.changed(self._seen)
        for prompt in [*self._indexes] if prompts is None else prompts & self._indexes.keys():
            self._load(prompt)
        level = check_budget(budget, min_prob)
        contexts = self._slots.contexts[slots, -CONTEXT_SIZE:]
        return DraftBatch(*draft_texts(self._table, slots, contexts, self._rule, budget, level))

    def observe(self, places: NDArray[np.int64], results: Results) -> None:
        """Do nothing: the texts themselves are not indexed."""

    def _load(self, prompt: int) -> None:
        """Index the latest answers to a prompt for all its texts; keep the present index if they are unknown now."""
        answers, index = self._store.recall(prompt, self._answers), self._indexes.get(prompt)
        if answers is not None or index is None:
            index = self._indexes[prompt] = _Index.of(answers or ())
        for slot, other in self._prompts.items():
            if other == prompt:
                self._point(slot, index)

    def _point(self, slot: int, index: _Index) -> None:
        self._table[slot] = index.history.row()
        self._table[slot, SIZE] = index.size
