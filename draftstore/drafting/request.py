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

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget, check_ids
from draftstore.drafting.history import LENGTHS, History, HistoryRule, append_tokens, draft_text
from draftstore.errors import require_vocabulary
from draftstore.jit import as_input
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree

SPARE = 1024
"""Spare room after a new session's prompt in tokens, in addition to a quarter of the prompt."""


class RequestDrafter:
    """Drafts from each text's own history; sessions share nothing."""

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
        self._prediction = check_ids(() if prediction is None else prediction, vocab_size, parts=True)

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "RequestSession":
        """Start the drafts of one text; see `Drafter.session`."""
        ids = check_ids(prompt_ids, self.vocab_size, parts=True)
        if len(self._prediction):
            # As if the same prompt had been answered before: its end leads to the prediction. The last id is the
            # first of the answer.
            ids = np.concatenate([ids[-1 - LENGTHS[-1] : -1], self._prediction, ids])
        return RequestSession(ids, self.vocab_size, self.rule)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        self.session([0, 0]).propose(1)


class RequestSession:
    """The drafts for one text: a `Session` that holds all its tokens."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, prompt_ids: ArrayLike, vocab_size: int, rule: HistoryRule) -> None:
        self._vocab_size = vocab_size
        self._rule = np.array(rule, np.float64)
        self._size = 0
        self._history = History.new(1)
        ids = check_ids(prompt_ids, vocab_size, parts=True)
        self._make_room(len(ids) + len(ids) // 4 + SPARE)
        self._append(ids)

    def __len__(self) -> int:
        """Return the number of tokens in the text."""
        return self._size

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft; see `Session`."""
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0:
            return DraftTree.empty()
        return DraftTree(*draft_text(*self._history, self._size, self._rule, budget, level))

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the text; TokenRangeError if one is outside the vocabulary; then nothing is appended."""
        ids = check_ids(accepted_ids, self._vocab_size, parts=True)
        if self._size + len(ids) > len(self._history.tokens):
            self._make_room((self._size + len(ids)) * 3 // 2)
        self._append(ids)

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._size = append_tokens(*self._history, self._size, as_input(ids, np.int32))

    def _make_room(self, capacity: int) -> None:
        text = self._history.tokens[: self._size]
        self._history, self._size = History.new(capacity), 0
        self._append(text)
