"""The interface of all drafters, and the session shared by drafters of static stores.

    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)
        ...one forward pass over the tree...
        session.observe(accepted_ids)          # the tokens that the pass accepted, bonus token last

All drafters have the same interface: local stores, the lookup service, and the request itself.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.projection import Projection
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.jit import read_only
from draftstore.trees.batch import Draft, DraftBatch
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree, highest_level

FEW_IDS = 32
"""Number of ids up to which Python checks their range faster than NumPy."""


class Session(Protocol):
    """The drafts for one text during decoding.

    A session or drafter may have a `projection`: then its hidden states are projected, float32 [dims].

    Attributes:
        needs_candidates: whether `observe` needs the target model's candidates, which cost a top-8 of every row.
        needs_hidden: whether `observe` needs hidden states.
    """

    needs_candidates: bool
    needs_hidden: bool

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; empty if there is none."""

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """Learn the result of a forward pass.

        Args:
            accepted_ids: int32 [k], the new ids of the text, bonus token last.
            tree: the verified tree, of n nodes. It need not contain any node of this session's draft, but all accepted
                ids but the last lie on one of its paths.
            candidates: int32 [n + 1, 8], the target model's top 8 at the root and at every node.
            hidden: float32 [d], the hidden state that predicted the last accepted id.
        """


class Drafter(Protocol):
    """Anything that proposes drafts: a local store, a remote one, the request itself."""

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.float32] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> Session:
        """Start the drafts of one text.

        Args:
            prompt_ids: int32 [any], the text so far: the prompt, and the token from the prefill.
            hidden: float32 [d], the hidden state that predicted the last id, projected if the drafter has a projection.
            candidates: int32 [m, 8], the target model's top 8 at the last m tokens before the last id, the last row
                that which predicted it; -1 where unknown. A drafter with `needs_candidates` gets rows of the whole
                prompt, at the last place of each token, others one row.
        """


class ContextDrafter(Protocol):
    """A drafter that uses only the last tokens of a text and, if it is dense (has a `projection`), a hidden state."""

    context_size: int
    vocab_size: int

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,
    ) -> list[Draft]:
        """Draft for a batch of contexts.

        Args:
            contexts: int32 [batch, size], the last tokens of each text, right-aligned and padded with -1.
            queries: float32 [batch, dims], the projected states that predicted the last tokens, of any length. A dense
                drafter returns empty drafts for rows with NaN, or without queries; others ignore them.
        """


class StoreDrafter(ContextDrafter, Protocol):
    """The drafter of a static store."""

    def draft_batch(self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0) -> DraftBatch:
        """Draft as `draft` does, with the result as arrays."""

    def session(self, prompt_ids: ArrayLike, **prefill: Any) -> "ContextSession":
        """Start the drafts of one text; see `Drafter.session`."""

    def warm_up(self) -> None:
        """Compile or load everything needed for the first draft."""


def projection_of(drafter: object) -> Projection | None:
    """Return the projection that hidden states need for a drafter or session; None: unprojected."""
    projection: Projection | None = getattr(drafter, "projection", None)
    return projection


def check_request(contexts: NDArray[np.int32], budget: int, min_prob: float) -> tuple[NDArray[np.int32], int]:
    """Return contexts as read-only int32 [batch, size], and the maximum level of a node; -1 if none is allowed.

    Raises:
        DraftstoreError: the budget is outside 0 .. 4,096, or contexts is not a matrix.
    """
    # Other types, or writable arrays beside read-only ones from frames, would compile another kernel.
    contexts = read_only(np.ascontiguousarray(contexts, np.int32))
    if contexts.ndim != 2:
        raise DraftstoreError(f"contexts are int32 [batch, size], found an array of shape {contexts.shape}")
    return contexts, check_budget(budget, min_prob)


def check_queries(queries: NDArray[np.float32], batch: int, dims: int) -> None:
    """Refuse queries, with a DraftstoreError, unless their shape is [batch, dims]."""
    if queries.shape != (batch, dims):
        raise DraftstoreError(
            f"queries of shape {queries.shape} for {batch} contexts: expected ({batch}, {dims}), projected hidden "
            "states"
        )


def check_budget(budget: int, min_prob: float) -> int:
    """Return the maximum level of a node with a minimum probability, -1 if none; DraftstoreError on a wrong budget."""
    if not 0 <= budget <= MAX_BUDGET:
        raise DraftstoreError(f"a budget of {budget} nodes: expected 0 to {MAX_BUDGET}")
    return LOWEST_LEVEL if min_prob <= 0.0 else highest_level(min_prob)


def check_ids(ids: ArrayLike, vocab_size: int, whose: str = "the model's") -> NDArray[np.integer[Any]]:
    """Return token ids as a flat array of integers; TokenRangeError unless all lie in [0, vocab_size)."""
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
        wrong = flat[(flat < 0) | (flat >= vocab_size)][0]
        raise TokenRangeError(
            f"token id {wrong} is outside {whose} vocabulary of {vocab_size:,} ids: "
            "use a drafter made for this model and its tokenizer"
        )
    return flat


class ContextSession:
    """A session over a static store: the last tokens and, for dense drafters, the state that predicted the last one.

    Attributes:
        context: int32 [1, context_size], the last tokens, padded with -1 on the left.
        query: float32 [1, dims], the projected state, NaN if unknown; None if the drafter is not dense.
    """

    needs_candidates = False

    def __init__(
        self, drafter: ContextDrafter, prompt_ids: ArrayLike, hidden: NDArray[np.float32] | None = None
    ) -> None:
        self.drafter = drafter
        self.projection = projection_of(drafter)
        self.needs_hidden = self.projection is not None
        self.context = np.full((1, drafter.context_size), -1, np.int32)
        self.query = None if self.projection is None else np.empty((1, self.projection.dims), np.float32)
        self.observe(prompt_ids, hidden=hidden)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft for the text so far; see `Session`."""
        return self.drafter.draft(self.context, budget, min_prob, self.query)[0].tree

    def observe(
        self, accepted_ids: ArrayLike, *, hidden: NDArray[np.float32] | None = None, **_feedback: Any
    ) -> None:
        """Append ids to the text; a dense drafter takes the state that predicted the last of them as its query.

        Raises:
            TokenRangeError: an id outside the store's vocabulary; nothing is appended.
            DraftstoreError: a hidden state of the wrong size.
        """
        ids = check_ids(accepted_ids, self.drafter.vocab_size, "the store's")
        if len(ids):
            row = self.context[0]
            new = ids[-len(row) :]
            row[: len(row) - len(new)] = row[len(new) :].copy()
            row[len(row) - len(new) :] = new
        if self.query is not None:
            if hidden is not None and hidden.shape != self.query.shape[1:]:
                raise DraftstoreError(
                    f"a projected state of shape {hidden.shape}, expected {self.query.shape[1:]}"
                )
            self.query[0] = np.nan if hidden is None else hidden


def propose_batch(
    drafter: ContextDrafter, sessions: Sequence[ContextSession], budget: int = 64, min_prob: float = 0.0
) -> list[DraftTree]:
    """Draft for many sessions of one drafter in one call; queries with another projection are ignored."""
    if not sessions:
        return []
    contexts = np.concatenate([session.context for session in sessions])
    queries, projection = None, projection_of(drafter)
    if projection is not None:
        queries = np.full((len(sessions), projection.dims), np.nan, np.float32)
        for row, session in zip(queries, sessions, strict=True):
            if session.projection is not None and session.projection.digest == projection.digest:
                row[:] = session.query
    return [draft.tree for draft in drafter.draft(contexts, budget, min_prob, queries)]
