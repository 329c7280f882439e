"""Drafters that use only the last tokens of a text, such as those of stores, and their sessions."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import NO_MATCH, check_ids, check_states
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree


class ContextDrafter(ABC):
    """A drafter that uses only the last tokens of a text and, if it is dense, the hidden state that predicted the last.

    Attributes:
        context_size: number of tokens that it uses.
        vocab_size: size of its vocabulary.
        hidden_size: size of a hidden state; 0 if the drafter is not dense.
    """

    context_size: int
    vocab_size: int
    hidden_size: int = 0

    @property
    def source(self) -> Hashable:
        """Key shared by drafters with the same drafts; see `draftstore.drafting.together`."""
        return id(self)

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

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **_prefill: Any
    ) -> "ContextSession":
        """Start the drafts of one text; see `Drafter.session` and, for errors, `ContextSession.observe`."""
        return ContextSession(self, prompt_ids, hidden)

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft."""
        nothing = np.full((1, self.context_size), -1, np.int32)
        self.draft_batch(nothing, hidden=np.full((1, self.hidden_size), np.nan, np.float16))


class ContextSession:
    """A session over a static store: the last tokens and, for dense drafters, the state that predicted the last one.

    Attributes:
        context: int32 [1, context_size], the last tokens, padded with -1 on the left.
        state: float16 [1, hidden_size], NaN if unknown; None if the drafter is not dense.
        reason: why the last draft is empty, if so; see `draftstore.drafting.outcomes`.
    """

    needs_candidates = False

    def __init__(
        self, drafter: ContextDrafter, prompt_ids: ArrayLike, hidden: NDArray[np.floating[Any]] | None = None
    ) -> None:
        self.drafter = drafter
        self.needs_hidden = drafter.hidden_size > 0
        self.context = np.full((1, drafter.context_size), -1, np.int32)
        self.state = np.empty((1, drafter.hidden_size), np.float16) if self.needs_hidden else None
        self.reason = NO_MATCH
        self.observe(prompt_ids, hidden=hidden)

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft for the text so far; see `Session`."""
        draft = self.drafter.draft(self.context, budget, min_prob, self.state)[0]
        self.reason = draft.reason
        return draft.tree

    def observe(
        self, accepted_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **_feedback: Any
    ) -> None:
        """Append ids to the text, with the state that predicted the last of them if the drafter is dense.

        Raises:
            TokenRangeError: an id outside the store's vocabulary; nothing is appended.
            DraftstoreError: a hidden state of the wrong size.
        """
        ids = check_ids(accepted_ids, self.drafter.vocab_size, "the store's", parts=True)
        if len(ids):
            row = self.context[0]
            new = ids[-len(row) :]
            row[: len(row) - len(new)] = row[len(new) :].copy()
            row[len(row) - len(new) :] = new
        if self.state is not None:
            self.state[0] = np.nan if hidden is None else check_states(hidden[None], *self.state.shape)[0]


def propose_batch(
    drafter: ContextDrafter, sessions: Sequence[ContextSession], budget: int = BUDGET, min_prob: float = 0.0
) -> list[DraftTree]:
    """Draft for many sessions of one drafter in one call."""
    if not sessions:
        return []
    contexts = np.concatenate([session.context for session in sessions])
    states = [session.state for session in sessions if session.state is not None]
    hidden = np.concatenate(states) if states else None
    drafts = drafter.draft(contexts, budget, min_prob, hidden)
    for session, draft in zip(sessions, drafts, strict=True):
        session.reason = draft.reason
    return [draft.tree for draft in drafts]
