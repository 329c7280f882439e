"""Sources of drafts for many texts: what a drafter keeps of each text, in a slot, and one call for all of them.

A drafter that can draft for several texts in one call has a `SlotSource`. The sessions of others are called one by one.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import Session
from draftstore.drafting.merging import find_wrong
from draftstore.errors import DraftTreeError
from draftstore.jit import as_input
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree

IDS = 1 << 31
"""Limit of ids where a source has no vocabulary."""


class Prefill(NamedTuple):
    """A text that joins; see `Drafter.session`. Its ids, int32 [any], are valid for its source.

    `prompt_size` is the number of ids of the prompt; None: all but the last.
    """

    ids: NDArray[np.int32]
    hidden: NDArray[np.floating[Any]] | None = None
    candidates: NDArray[np.int32] | None = None
    prompt_size: int | None = None


class Results(NamedTuple):
    """The results of a forward pass for a batch of texts; see `draftstore.drafting.slots.Slots.observe`."""

    slots: NDArray[np.int64]
    ids: NDArray[np.int32]
    stops: NDArray[np.int64]
    trees: Sequence[DraftTree | None]
    candidates: Sequence[NDArray[np.int32] | None]
    hidden: NDArray[np.floating[Any]] | None

    def new(self, place: int) -> NDArray[np.int32]:
        """Return the new ids of a text, int32 [any]."""
        return self.ids[(self.stops[place - 1] if place else 0) : self.stops[place]]

    def state(self, place: int) -> NDArray[np.floating[Any]] | None:
        """Return the hidden state of a text, float [hidden_size]; None if it is unknown."""
        return None if self.hidden is None or np.isnan(self.hidden[place]).all() else self.hidden[place]


class SlotSource(ABC):
    """The drafts of one source for texts in slots.

    Attributes:
        vocab_size: limit of ids.
    """

    vocab_size = IDS

    def needs(self, slot: int) -> tuple[bool, bool]:  # noqa: ARG002
        """Return whether a text needs candidates, and whether hidden states; see `Session`."""
        return False, False

    @abstractmethod
    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        """Start a text of a drafter of this source."""

    def leave(self, slot: int) -> None:  # noqa: B027
        """Forget a text, which may have failed to join."""

    @abstractmethod
    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts, int64 [batch]; see `Session.propose`. The budget is at least 1."""

    @abstractmethod
    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception] | None:
        """Learn the results of a forward pass for texts at `places` of a batch; return errors by place."""


class SessionSource(SlotSource):
    """The sessions of drafters that draft for one text at a time."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def needs(self, slot: int) -> tuple[bool, bool]:
        """Return what the session needs."""
        return self._sessions[slot].needs_candidates, self._sessions[slot].needs_hidden

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        """Start the session of a text."""
        self._sessions[slot] = drafter.session(
            prefill.ids, hidden=prefill.hidden, candidates=prefill.candidates
        )

    def leave(self, slot: int) -> None:
        """Drop the session of a text."""
        self._sessions.pop(slot, None)

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Let each session propose; DraftTreeError if a proposal is not a tree."""
        trees = [self._sessions[slot].propose(budget, min_prob) for slot in slots.tolist()]
        return DraftBatch.joined([_batch_of(tree, budget) for tree in trees])

    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception]:
        """Let each session learn; see `SlotSource`."""
        errors = {}
        for place in places.tolist():
            session = self._sessions[int(results.slots[place])]
            new, tree, candidates = results.new(place), results.trees[place], results.candidates[place]
            try:
                session.observe(new, tree=tree, candidates=candidates, hidden=results.state(place))
            except Exception as error:  # noqa: BLE001 (of this text alone)
                errors[place] = error
        return errors


def check_trees(batch: DraftBatch, texts: int) -> DraftBatch:
    """Return the drafts of so many texts; DraftTreeError if one is not a tree, as kernels rely on that."""
    tokens, parents, sizes = batch.tokens, batch.parents, batch.sizes
    shapes = tokens.shape == parents.shape == batch.levels.shape == (texts, *tokens.shape[1:2])
    if not shapes or sizes.shape != (texts,) or tokens.ndim != 2:
        raise DraftTreeError(
            "its proposal is not a tree: expected a token, a parent and a level for each node"
        )
    row, node = find_wrong(as_input(tokens, np.int32), as_input(parents, np.int16), as_input(sizes, np.int32))
    if node >= 0:
        raise DraftTreeError(
            f"it proposed node {node} with token {tokens[row, node]} and parent {parents[row, node]}: expected a "
            "non-negative id, and -1 or an earlier node as parent"
        )
    if row >= 0:
        raise DraftTreeError(f"it proposed {sizes[row]} nodes of {tokens.shape[1]}")
    return batch


def _batch_of(tree: DraftTree, budget: int) -> DraftBatch:
    """Return a proposal as a batch of one, cut to a budget; DraftTreeError if it is not a tree."""
    types = {"tokens": np.int32, "parents": np.int16, "levels": np.uint8}
    try:
        tokens, parents, levels = (
            np.asarray(getattr(tree, name))[None, :budget].astype(dtype, casting="same_kind", copy=False)
            for name, dtype in types.items()
        )
    except Exception as error:
        raise DraftTreeError(f"its proposal is not a tree: {error}") from error
    return check_trees(DraftBatch.plain(tokens, parents, levels, np.array([tokens.shape[1]], np.int32)), 1)
