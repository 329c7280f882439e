"""Arrays for engines: the same as a slow reference's, with every padding row a draft like any other."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.engines.masks import rows_and_mask
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.unit.trees.test_tree import trees


def expected(tree: DraftTree, last: int, rows: int) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the rows of one text, slowly: a path from row 0 for each row."""
    above, tokens = [-1], [last]
    for row in range(1, rows):
        above.append(int(tree.parents[row - 1]) + 1 if row <= len(tree) else row - 1)
        tokens.append(int(tree.tokens[row - 1]) if row <= len(tree) else tokens[-1])
    mask = np.zeros((rows, rows), np.bool_)
    for row in range(rows):
        column = row
        while column >= 0:
            mask[row, column] = True
            column = above[column]
    return tokens, mask


@given(st.lists(trees(12), max_size=4), st.integers(1, 16))
def test_arrays_are_those_of_the_reference(drafts: Sequence[DraftTree], rows: int) -> None:
    lasts = [100 + place for place in range(len(drafts))]
    batch = DraftBatch.of([(tree.tokens, tree.parents, tree.levels, 0, 0) for tree in drafts])
    tokens, mask = rows_and_mask(batch, lasts, rows)
    assert (tokens.dtype, mask.dtype) == (np.dtype("int64"), np.dtype("bool"))
    assert (tokens.shape, mask.shape) == ((len(drafts) * rows,), (len(drafts) * rows * rows,))
    for place, (draft, last) in enumerate(zip(drafts, lasts, strict=True)):
        want_tokens, want_mask = expected(draft, last, rows)
        assert tokens.reshape(-1, rows)[place].tolist() == want_tokens
        assert mask.reshape(-1, rows, rows)[place].tobytes() == want_mask.tobytes()
