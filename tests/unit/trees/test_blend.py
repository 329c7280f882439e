from collections.abc import Sequence

import numpy as np
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.trees.blend import blend_trees
from draftstore.trees.frontier import finish, new_frontier
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.fakes.adversaries import tree_of
from tests.reference import Nodes, UnclearError, nodes_of, tree_from
from tests.unit.trees.test_tree import trees as drafts

TOKENS = [0, 1, 2, 65_535, 151_664, 2**31 - 1]


def trees(most: int = 12) -> st.SearchStrategy[Nodes]:
    """Draw a tree of one node at least."""
    return drafts(most, 1, st.sampled_from(TOKENS)).map(nodes_of)


@st.composite
def forests(draw: st.DrawFn, most: int = 5) -> tuple[list[Nodes], list[float]]:
    """Draw trees with weights that sum to at most one; some of them nothing at all."""
    forest = draw(st.lists(trees(), min_size=1, max_size=most))
    shares = st.sampled_from([0.0, 0.137, 0.271, 0.5, 0.731, 0.999])
    left, weights = 1.0, []
    for _ in forest:
        weights.append(left * draw(shares))
        left -= weights[-1]
    return forest, weights


def blended(
    forest: Sequence[Nodes],
    weights: Sequence[float],
    budget: int = 64,
    max_depth: int = 63,
    max_level: int = 255,
) -> DraftTree:
    joined = [tree_from(nodes) for nodes in forest]
    best = new_frontier(budget)
    size = blend_trees(
        np.concatenate([tree.tokens for tree in joined]),
        np.concatenate([tree.parents for tree in joined]),
        np.concatenate([tree.levels for tree in joined]),
        np.cumsum([len(tree) for tree in forest]).astype(np.int64),
        np.array(weights, np.float64),
        best,
        max_depth,
        max_level,
    )
    found = finish(best, size)
    assert [array.dtype for array in found] == [np.int32, np.int16, np.uint8]
    tree = DraftTree(*found)
    tree.validate()
    return tree


@given(forests(), st.integers(1, 40), st.integers(1, 6), st.integers(0, 255))
def test_chances_of_equal_paths_add_up(
    forest: tuple[list[Nodes], list[float]], budget: int, max_depth: int, max_level: int
) -> None:
    try:
        expected = reference.blend_trees(*forest, budget, max_depth, max_level)
    except UnclearError:
        reject()
    assert nodes_of(blended(*forest, budget, max_depth, max_level)) == expected


def test_many_wide_trees() -> None:
    """Nine trees of 256 nodes each, as a lookup of nine lengths would blend."""
    rng = np.random.default_rng(5)
    forest = []
    for _ in range(9):
        chances: dict[reference.Ngram, float] = {}
        while len(chances) < 256:
            parent = [(), *chances][int(rng.integers(0, len(chances) + 1))]
            path = (*parent, int(rng.integers(0, 30)))
            chances.setdefault(path, chances.get(parent, 1.0) * float(rng.uniform(0.4, 0.95)))
        forest.append(nodes_of(tree_of(chances)))
    weights = [0.61 * 0.39**i for i in range(9)]
    for budget in (1, 64, 4096):
        assert nodes_of(blended(forest, weights, budget)) == reference.blend_trees(forest, weights, budget)
