"""The interface of all drafters, and the session shared by drafters of static stores.

    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)
        ...one forward pass over the tree...
        session.observe(accepted_ids)          # the tokens that the pass accepted, bonus token last

All drafters have the same interface: local stores, the lookup service, and the request itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.jit import read_only
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.frontier import BUDGET, MAX_BUDGET
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree, highest_level

NO_MATCH = "no_match"
SEPARATOR = -(1 << 31)
"""Stands in a text for what is no token, such as an image: no match spans it. No program uses it by mistake, as -1."""
FEW_IDS = 32
"""Maximum number of ids whose range Python checks faster than NumPy."""


class Session(Protocol):
    """The drafts for one text during decoding.

    Attributes:
        needs_candidates: whether `observe` needs the target model's candidates, which cost a top-8 search per row.
        needs_hidden: whether `observe` needs hidden states.
    """

    needs_candidates: bool
    needs_hidden: bool

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each with a probability of at least `min_prob`; it may be empty."""

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """Learn the result of a forward pass.

        Args:
            accepted_ids: int32 [k], the new ids of the text, bonus token last; `SEPARATOR` hides those before it.
            tree: the verified tree, of n nodes. It need not contain any node of this session's draft, but all accepted
                ids except the last lie on one of its paths.
            candidates: int32 [n + 1, 8], the target model's top 8 at the root and at every node.
            hidden: float [hidden_size], the hidden state that predicted the last accepted id.
        """


class Drafter(Protocol):
    """Anything that proposes drafts: a local store, a remote one, the request itself."""

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text.

        Args:
            prompt_ids: int32 [any], the text so far: the prompt, maybe with `SEPARATOR`, and the token from the
                prefill.
            hidden: float [hidden_size], the model's hidden state (after the final norm) that predicted the last id.
            candidates: int32 [m, 8], the target model's top 8 at the last m tokens before the last id, so the last
                row predicted it; -1 where unknown. A drafter with `needs_candidates` gets rows of the whole prompt, at
                the last occurrence of each token, others one row.
        """


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
    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts.

        Args:
            contexts: int32 [batch, size], the last tokens of each text, right-aligned and padded with -1; a negative
                id hides those before it.
            hidden: float16 [batch, hidden_size], the states that predicted the last tokens. A dense drafter returns
                empty drafts without them and for rows with non-finite values; others ignore them.

        Raises:
            DraftstoreError: the budget is outside 0 .. 4,096, contexts is not a matrix, or the hidden states have the
                wrong shape.
        """

    def session(
        self, prompt_ids: ArrayLike, *, hidden: NDArray[np.floating[Any]] | None = None, **_prefill: Any
    ) -> "ContextSession":
        """Start the drafts of one text; see `Drafter.session` and, for errors, `ContextSession.observe`."""
        return ContextSession(self, prompt_ids, hidden)

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft."""
        nothing = np.full((1, self.context_size), -1, np.int32)
        self.draft(nothing, hidden=np.full((1, self.hidden_size), np.nan, np.float16))


class StoreDrafter(ContextDrafter):
    """The drafter of a store, without state of a text, so threads may share it. A kind implements `draft_batch`."""

    @abstractmethod
    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        """Draft like `draft`, with the result as arrays."""

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = BUDGET,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts; see `ContextDrafter.draft`."""
        return self.draft_batch(contexts, budget, min_prob, hidden).drafts()


def check_request(contexts: NDArray[np.int32], budget: int, min_prob: float) -> tuple[NDArray[np.int32], int]:
    """Return contexts as read-only int32 [batch, size], and the maximum level of a node, or -1 if no node is allowed.

    Raises:
        DraftstoreError: the budget is outside 0 .. 4,096, or contexts is not a matrix.
    """
    # Other types, or writable arrays besides the read-only ones from frames, would compile another kernel.
    contexts = read_only(np.ascontiguousarray(contexts, np.int32))
    if contexts.ndim != 2:
        raise DraftstoreError(f"contexts are int32 [batch, size], found an array of shape {contexts.shape}")
    return contexts, check_budget(budget, min_prob)


def check_states(hidden: NDArray[np.floating[Any]], batch: int, size: int) -> NDArray[np.float16]:
    """Return hidden states as float16 [batch, size], infinite beyond its range; DraftstoreError on another shape."""
    if hidden.shape != (batch, size):
        raise DraftstoreError(
            f"hidden states of shape {hidden.shape}, expected ({batch}, {size}): use a store that was built with this "
            "model"
        )
    with np.errstate(over="ignore"):
        return np.asarray(hidden, np.float16)


def check_budget(budget: int, min_prob: float) -> int:
    """Return the maximum level for a minimum probability, -1 if no node has it; DraftstoreError on a wrong budget."""
    if not 0 <= budget <= MAX_BUDGET:
        raise DraftstoreError(f"a budget of {budget} nodes: expected 0 to {MAX_BUDGET}")
    return LOWEST_LEVEL if min_prob <= 0.0 else highest_level(min_prob)


def separated(ids: ArrayLike, vocab_size: int) -> NDArray[np.int32]:
    """Return int32 [any], ids of a text with `SEPARATOR` in place of those outside the vocabulary, such as images."""
    flat = np.asarray(ids, np.int64).reshape(-1)
    if len(flat) <= FEW_IDS and all(0 <= each < vocab_size for each in flat.tolist()):
        return flat.astype(np.int32)
    return np.where((flat < 0) | (flat >= vocab_size), SEPARATOR, flat).astype(np.int32)


def check_ids(
    ids: ArrayLike, vocab_size: int, whose: str = "the model's", *, parts: bool = False
) -> NDArray[np.integer[Any]]:
    """Return token ids as a flat array of integers; TokenRangeError unless all lie in [0, vocab_size).

    With `parts`, a text may have `SEPARATOR` between its parts.
    """
    flat = np.asarray(ids).reshape(-1)
    if len(flat) == 0:
        return np.empty(0, np.int32)
    if flat.dtype.kind not in "iu":
        raise TokenRangeError(f"token ids are integers, found an array of {flat.dtype}")
    if len(flat) <= FEW_IDS:
        few = flat.tolist()
        lowest, highest = min(few), max(few)
    else:
        lowest, highest = flat.min(), flat.max()
    if lowest < 0 or highest >= vocab_size:
        wrong = flat[((flat < 0) & ~(parts & (flat == SEPARATOR))) | (flat >= vocab_size)]
        if len(wrong) == 0:
            return flat
        raise TokenRangeError(
            f"token id {wrong[0]} is outside {whose} vocabulary of {vocab_size:,} ids: "
            "use a drafter made for this model and its tokenizer"
        )
    return flat


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


class DisabledSession:
    """A `Session` without drafts: for plain decoding, or in place of a source that has failed."""

    needs_candidates = False
    needs_hidden = False
    reason = "failed"

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the empty tree."""
        return DraftTree.empty()

    def observe(self, accepted_ids: Any, **feedback: Any) -> None:
        """Do nothing."""


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
