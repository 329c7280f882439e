"""Drafts from texts in several stores, as no machine holds them all: *partitions* by document.

    drafter = PartitionedDrafter([first.drafter(), second.drafter()])      # a `ContextDrafter`, one source of a mixture

Every partition drafts for itself from its own documents, and the probabilities are added up. A partition's share of
them doubles with every token that its match is longer; one without a draft has none. It is not the draft of one store
of all documents, which weighs every suffix by its occurrences in all of them: docs/many-machines.md compares the two.

Unlike the sources of a mixture, partitions are not independent: their agreement must not make a token more certain than
each of them thinks it is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import ContextDrafter, ContextSession, check_budget
from draftstore.drafting.joining import join_trees
from draftstore.errors import DraftstoreError
from draftstore.jit import kernel
from draftstore.trees.batch import Draft
from draftstore.trees.blend import blend_trees
from draftstore.trees.frontier import MAX_DEPTH, finish, new_frontier
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree


class PartitionedDrafter:
    """Drafts of several stores of one kind of text as one; has no per-text state, so threads may share it."""

    def __init__(self, drafters: Sequence[ContextDrafter]) -> None:
        """Draft from partitions of one vocabulary, none of them dense; their order affects only rounding."""
        sizes = {drafter.vocab_size for drafter in drafters}
        if len(sizes) != 1:
            raise DraftstoreError(
                f"partitions with vocabularies of {sorted(sizes)} ids: expected one size for all of them"
            )
        if any(getattr(drafter, "projection", None) is not None for drafter in drafters):
            raise DraftstoreError("a dense store cannot be a partition: partitions need no hidden states")
        self.drafters = tuple(drafters)
        self.vocab_size = sizes.pop()
        self.context_size = max(drafter.context_size for drafter in drafters)

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        queries: NDArray[np.float32] | None = None,  # noqa: ARG002
    ) -> list[Draft]:
        """Draft for a batch of contexts; a match is the longest of any partition, with all its occurrences."""
        level = check_budget(budget, min_prob)
        parts = self.draft_each(contexts, budget if level >= 0 else 0)
        return [join_drafts(drafts, budget, level) for drafts in zip(*parts, strict=True)]

    def draft_each(self, contexts: NDArray[np.int32], budget: int) -> list[list[Draft]]:
        """Return the drafts of every partition, of any probability: another one may confirm an unlikely node."""
        return [drafter.draft(contexts, budget) for drafter in self.drafters]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`."""
        return ContextSession(self, prompt_ids)

    def warm_up(self) -> None:
        """Compile the kernel, or load it from numba's cache; the partitions' own kernels are not included."""
        one = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int16), np.zeros(1, np.uint8))
        join_drafts([Draft(one, 1, 1)] * 2, 1, LOWEST_LEVEL)


def join_drafts(drafts: Sequence[Draft], budget: int, max_level: int) -> Draft:
    """Return the draft of all partitions from one draft of each for the same context."""
    found = [draft for draft in drafts if len(draft.tree.tokens)]
    longest = max(draft.match_length for draft in drafts)
    count = sum(draft.match_count for draft in drafts if draft.match_length == longest)
    if not found or max_level < 0:
        return Draft(DraftTree.empty(), longest, count)
    trees = join_trees([draft.tree for draft in found])
    return Draft(DraftTree(*add_up(*trees, _shares(found), budget, max_level)), longest, count)


def _shares(drafts: Sequence[Draft]) -> NDArray[np.float64]:
    """Return the share of the probability that each draft gets, float64 [drafts], 1 together."""
    lengths = np.array([draft.match_length for draft in drafts])
    shares: NDArray[np.float64] = np.ldexp(1.0, lengths - lengths.max())  # exact, and so is their sum
    shares /= shares.sum()
    return shares


@kernel
def add_up(
    tokens: Any, parents: Any, levels: Any, stops: Any, shares: Any, budget: Any, max_level: Any
) -> Any:
    """Add up draft trees by their shares, float64 [trees], sum 1; see `blend_trees`. Returns the tree's arrays."""
    nodes = new_frontier(budget)
    return finish(nodes, blend_trees(tokens, parents, levels, stops, shares, nodes, MAX_DEPTH, max_level))
