"""The interface of all drafters, and the session shared by drafters of static stores.

    session = drafter.session(prompt_ids)
    while decoding:
        tree = session.propose(budget=64)
        ...one forward pass over the tree...
        session.observe(accepted_ids)          # the tokens that the pass accepted, bonus token last

All drafters have the same interface: local stores, the lookup service, and the request itself.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.jit import read_only
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
    ids: ArrayLike, vocab_size: int, owner: str = "the model's", *, parts: bool = False
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
            f"token id {wrong[0]} is outside {owner} vocabulary of {vocab_size:,} ids: "
            "use a drafter made for this model and its tokenizer"
        )
    return flat
