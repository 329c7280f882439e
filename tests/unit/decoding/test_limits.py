"""Drafts within the limits of their texts: depth, number of nodes, valid trees of known tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.limits import within_limits
from draftstore.errors import DecodingError, DraftTreeError
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.reference import nodes_of, paths_of
from tests.unit.trees.test_tree import tree_of, trees

VOCAB = 2**31


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 40))
def test_trees_are_cut_to_a_depth_and_a_number_of_nodes(drawn: list[DraftTree], most: int) -> None:
    deepest = max(tree.depths.max(initial=0) for tree in drawn)
    for depth in range(deepest + 2):
        limits = np.tile(np.array([most, depth, VOCAB]), (len(drawn), 1))
        found, errors = within_limits(DraftBatch.of_trees(drawn), limits)
        assert errors == {}
        for tree, cut in zip(drawn, found.trees(), strict=True):
            cut.validate()
            levels = paths_of(nodes_of(tree))
            left = [path for path in levels if len(path) <= depth][:most]
            assert paths_of(nodes_of(cut)) == {path: levels[path] for path in left}


def test_an_invalid_draft_is_empty_and_an_error_of_its_text() -> None:
    drawn = [tree_of([4, 4], [-1, -1], [0, 0]), tree_of([4, 5], [-1, 0], [0, 0]), tree_of([9], [-1], [0])]
    found, errors = within_limits(DraftBatch.of_trees(drawn), np.tile(np.array([8, 8, 9]), (3, 1)))
    assert found.trees()[1] == drawn[1]
    assert found.sizes.tolist() == [0, 2, 0]
    assert {place: type(error) for place, error in errors.items()} == {0: DraftTreeError, 2: DecodingError}
