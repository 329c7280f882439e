"""The walk of the benchmark of SGLang's seam: that of the double, and no mask but a tree's passes."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from benchmarks.engine_sglang import accepted
from benchmarks.ngram import parents_of
from draftstore.engines.masks import rows_and_mask
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import tree_of
from tests.fakes.sglang_engine import verify

paths = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)
trees = st.dictionaries(paths, st.floats(0.01, 1.0), max_size=12).map(tree_of)


@given(trees, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(2, 12))
def test_it_accepts_what_the_engine_accepts(tree: DraftTree, coming: Sequence[int], rows: int) -> None:
    tokens, mask = rows_and_mask([tree], [9], rows)
    (parents,) = parents_of(mask.reshape(1, rows, rows))
    emitted = verify(tokens, mask.reshape(rows, rows), [9], lambda text: [*coming, -1][len(text) - 1])
    assert accepted(tokens, parents, coming) == len(emitted) - 1


def test_a_mask_that_is_no_tree_ends_it() -> None:
    _, mask = rows_and_mask([tree_of({(1, 2): 0.5, (3,): 0.4})], [9], 4)
    for place in (1, 0, 8):
        wrong = mask.copy()
        wrong[place] = ~wrong[place]
        with pytest.raises(SystemExit, match="not that of a tree"):
            parents_of(wrong.reshape(1, 4, 4))
