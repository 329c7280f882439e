"""Drafts from the request itself: what followed the last tokens earlier in the prompt and in the output so far.

    prompt and output     Rename x to y : x = f ( x ) => y = f
    the last token `f` occurred before, and so did `= f`; `(` followed, then `x )`

    drafter = RequestDrafter(model.config.vocab_size)
    session = drafter.session(prompt_ids)              # a `Session`: no store, no model, no corpus

The tree grows best-first by the rule of `draftstore.search.expand`, with the text itself in the store's place: at
every node, all suffixes of text and path are asked, the longest first, and one with c earlier occurrences, followed
by d distinct tokens, gets c / (c + beta d + alpha) of the probability that is left. Occurrences end before the last
token, which nothing has followed yet.

**What it costs does not grow with the text.** Each of the last 1, 2, 4 and 8 tokens is the key of a hash table, whose
entry begins a list of earlier occurrences, from the last one back: two arrays that grow with the text.

- To append k tokens takes 4 k table lookups; when the arrays are full, they grow by half, and are filled anew.
- A node reads the last 32 occurrences in each list and compares 32 tokens of each at most. So of a token that occurs
  more often, old occurrences count only as part of a longer match.
- A draft expands as many nodes as it has, and copies no more of the text than the last 32 tokens.
- A session takes 65 to 125 bytes a token, where there are many.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget, check_ids
from draftstore.drafting.history import LENGTHS, RequestRule, append_tokens, draft_text
from draftstore.errors import DraftstoreError
from draftstore.jit import as_input
from draftstore.trees.tree import DraftTree

SPARE = 1024
"""Tokens that a new session has room for behind its prompt, and a fourth of the prompt more."""


class RequestDrafter:
    """Drafts from each text's own past; its sessions share nothing."""

    def __init__(self, vocab_size: int, rule: RequestRule | None = None) -> None:
        """Draft for texts of ids in [0, vocab_size).

        Raises:
            DraftstoreError: no ids, or a rule with a value that the kernels cannot follow.
        """
        if not 1 <= vocab_size < 2**31:
            raise DraftstoreError(f"a vocabulary of {vocab_size:,} ids: expected 1 to {2**31 - 1:,}")
        self.rule = RequestRule() if rule is None else rule
        self.rule.check()
        self.vocab_size = vocab_size

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "RequestSession":
        """Start the drafts of one text; see `Drafter.session`.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
        """
        return RequestSession(prompt_ids, self.vocab_size, self.rule)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft is waited for."""
        self.session([0, 0]).propose(1)


class RequestSession:
    """The drafts of one text: a `Session` that remembers the whole of it."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, prompt_ids: ArrayLike, vocab_size: int, rule: RequestRule) -> None:
        """Start from a prompt; see `RequestDrafter.session`."""
        self._vocab_size = vocab_size
        self._rule = np.array(rule, np.float64)
        self._size = 0
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        ids = check_ids(prompt_ids, vocab_size)
        self._make_room(len(ids) + len(ids) // 4 + SPARE)
        self._append(ids)

    def __len__(self) -> int:
        """Return the tokens of the text."""
        return self._size

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; see `Session`.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096.
        """
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0:
            return DraftTree.empty()
        return DraftTree(
            *draft_text(self._tokens, self._links, self._heads, self._size, self._rule, budget, level)
        )

    def observe(self, accepted_ids: ArrayLike, **_feedback: Any) -> None:
        """Append ids to the text; what else the pass brought does not matter here.

        Raises:
            TokenRangeError: an id outside the vocabulary; nothing is appended then.
        """
        ids = check_ids(accepted_ids, self._vocab_size)
        if self._size + len(ids) > len(self._tokens):
            self._make_room((self._size + len(ids)) * 3 // 2)
        self._append(ids)

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        self._size = append_tokens(
            self._tokens, self._links, self._heads, self._size, as_input(ids, np.int32)
        )

    def _make_room(self, capacity: int) -> None:
        """Move the text to arrays for `capacity` tokens; tables are never more than half full."""
        text = self._tokens[: self._size]
        self._tokens = np.empty(capacity, np.int32)
        self._links: NDArray[np.int32] = np.empty((len(LENGTHS), capacity), np.int32)
        cells = 1 << (2 * capacity - 1).bit_length()
        self._heads: NDArray[np.int32] = np.full((len(LENGTHS), cells), -1, np.int32)
        self._size = 0
        self._append(text)
