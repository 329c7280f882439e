"""Drafts of a store for a model of another vocabulary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.fitting import FittedDrafter
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import trees


class Fixed(ContextDrafter):
    """A drafter with the same drafts at every call, which notes what it is asked."""

    context_size, vocab_size = 3, 100

    def __init__(self, drafts: DraftBatch) -> None:
        self.drafts = drafts
        self.contexts: list[list[int]] = []

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        self.contexts = contexts.tolist()
        return self.drafts


def below(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return the nodes whose paths have only ids below a size, one by one."""
    kept = [i for i in range(len(tree)) if all(tree.tokens[node] < vocab_size for node in tree.path(i))]
    parents = [kept.index(parent) if parent >= 0 else -1 for parent in tree.parents[kept].tolist()]
    return DraftTree(tree.tokens[kept], np.array(parents, np.int16), tree.levels[kept])


@given(st.lists(trees(), max_size=5), st.integers(0, 3), st.data())
def test_ids_that_the_model_does_not_know_are_removed_with_what_follows(
    forest: list[DraftTree], more: int, data: st.DataObject
) -> None:
    drafts = batch_of(forest, max([len(tree) for tree in forest], default=0) + more)
    known = sorted({int(token) for tree in forest for token in tree.tokens}) or [1]
    size = data.draw(st.sampled_from(known)) + data.draw(st.integers(0, 1))
    before = drafts.tokens.copy()
    found = FittedDrafter(Fixed(drafts), size).draft_batch(np.zeros((len(forest), 3), np.int32))
    assert [draft.tree for draft in found.drafts()] == [below(tree, size) for tree in forest]
    assert [draft[1:] for draft in found.drafts()] == [draft[1:] for draft in drafts.drafts()]
    assert (drafts.tokens == before).all()


def test_ids_that_the_store_does_not_know_are_hidden() -> None:
    drafter = Fixed(DraftBatch.empty(1))
    FittedDrafter(drafter, 200).draft(np.array([[99, 100, 7]], np.int32))
    assert drafter.contexts == [[99, -1, 7]]


def test_a_damaged_store_is_asked_no_more() -> None:
    damage = [None, "cut", None]
    tree = DraftTree(np.array([5], np.int32), np.array([-1], np.int16), np.zeros(1, np.uint8))
    fitted = FittedDrafter(Fixed(batch_of([tree], 1)), 100, lambda: damage.pop(0))
    one = np.zeros((1, 3), np.int32)
    assert [len(fitted.draft(one)[0].tree) for _ in range(3)] == [1, 0, 0]
    assert damage == [None]
