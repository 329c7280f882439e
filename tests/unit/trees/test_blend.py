from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.trees.blend import blend_trees
from draftstore.trees.frontier import finish, new_frontier
from draftstore.trees.tree import LEVEL_PROBS, DraftTree, highest_level, level_of
from tests import reference
from tests.examples import examples
from tests.reference import Nodes, UnclearError, nodes_of

TOKENS = [0, 1, 2, 65_535, 151_664, 2**31 - 1]


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> Nodes:
    """Draw a tree in canonical order: levels never fall from parent to child, siblings differ."""
    chances: dict[reference.Ngram, float] = {}
    levels: dict[reference.Ngram, int] = {(): 0}
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(sorted(levels)))
        path = (*parent, draw(st.sampled_from(TOKENS)))
        if path not in levels:
            levels[path] = min(levels[parent] + draw(st.integers(0, 20)), 255)
            chances[path] = reference.level_prob(levels[path])
    return reference.heaviest(chances, most, 99, 255)


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
    nodes = [node for tree in forest for node in tree]
    tokens, parents, levels = zip(*nodes, strict=True) if nodes else ((), (), ())
    best = new_frontier(budget)
    size = blend_trees(
        np.array(tokens, np.int32),
        np.array(parents, np.int16),
        np.array(levels, np.uint8),
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


@examples(400)
@given(forests(), st.integers(1, 40), st.integers(1, 6), st.integers(0, 255))
def test_chances_of_equal_paths_add_up(
    forest: tuple[list[Nodes], list[float]], budget: int, max_depth: int, max_level: int
) -> None:
    try:
        expected = reference.blend_trees(*forest, budget, max_depth, max_level)
    except UnclearError:
        reject()
    assert nodes_of(blended(*forest, budget, max_depth, max_level)) == expected


@given(forests(), st.floats(0.0, 1.0))
def test_less_budget_and_a_bound_are_prefixes(
    forest: tuple[list[Nodes], list[float]], min_prob: float
) -> None:
    whole = blended(*forest, 4096)
    for budget in range(1, len(whole) + 2):
        assert blended(*forest, budget) == whole.prefix(budget)
    kept = int(np.count_nonzero(whole.probs >= min_prob))
    assert blended(*forest, 4096, max_level=highest_level(min_prob)) == whole.prefix(kept)


@given(trees())
def test_one_tree_of_full_weight_stays_as_it_is(nodes: Nodes) -> None:
    assert nodes_of(blended([nodes], [1.0])) == nodes
    assert nodes_of(blended([nodes, nodes], [0.5, 0.5])) == nodes
    assert nodes_of(blended([nodes, nodes, nodes], [0.0, 1.0, 0.0])) == nodes


def test_a_worked_example() -> None:
    """Two of three trees say 5; what they leave unsaid of the weight is nobody's."""
    first: Nodes = [(5, -1, 0), (7, 0, 16)]
    second: Nodes = [(5, -1, 16), (9, -1, 16), (7, 0, 32), (8, 1, 32)]
    third: Nodes = [(9, -1, 0)]
    tree = blended([first, second, third], [0.5, 0.25, 0.125])
    assert nodes_of(tree) == [
        (5, -1, level_of(0.5 + 0.125)),
        (7, 0, level_of(0.25 + 0.0625)),
        (9, -1, level_of(0.125 + 0.125)),
        (8, 2, level_of(0.0625)),
    ]


def test_ties_go_to_the_parent_then_to_the_lower_token() -> None:
    tree = blended([[(9, -1, 16), (4, 0, 16)], [(3, -1, 16), (4, 0, 16)]], [0.5, 0.5])
    assert nodes_of(tree) == [(3, -1, 32), (9, -1, 32), (4, 0, 32), (4, 1, 32)]
    assert nodes_of(blended([[(9, -1, 16), (4, 0, 16)], [(3, -1, 16)]], [0.5, 0.5], 2)) == [
        (3, -1, 32),
        (9, -1, 32),
    ]


def test_weights_of_nothing_make_no_nodes() -> None:
    assert len(blended([[(1, -1, 0)], [(2, -1, 0)]], [0.0, 0.0])) == 0
    assert len(blended([[(1, -1, 200)]], [2.0**-5])) == 0
    assert len(blended([[], []], [0.5, 0.5])) == 0
    assert nodes_of(blended([[], [(1, -1, 0)]], [0.5, 0.5])) == [(1, -1, 16)]


@pytest.mark.parametrize("depth", [1, 9, 63])
def test_paths_as_long_as_there_are(depth: int) -> None:
    chain: Nodes = [(i % 3, i - 1, 0) for i in range(63)]
    assert nodes_of(blended([chain, chain], [0.5, 0.25], 64, depth)) == [
        (token, parent, level_of(0.75)) for token, parent, _ in chain[:depth]
    ]


def test_many_wide_trees() -> None:
    """Nine trees of 256 nodes each, as a lookup of nine lengths would blend."""
    rng = np.random.default_rng(5)
    forest = []
    for _ in range(9):
        levels: dict[reference.Ngram, int] = {(): 0}
        while len(levels) < 257:
            parent = list(levels)[int(rng.integers(0, len(levels)))]
            path = (*parent, int(rng.integers(0, 30)))
            levels.setdefault(path, min(levels[parent] + int(rng.integers(1, 20)), 255))
        del levels[()]
        chances = {path: reference.level_prob(level) for path, level in levels.items()}
        forest.append(reference.heaviest(chances, 256, 63, 255))
    weights = [0.61 * 0.39**i for i in range(9)]
    for budget in (1, 64, 4096):
        tree = blended(forest, weights, budget)
        assert nodes_of(tree) == reference.blend_trees(forest, weights, budget)
    assert len(tree) > 200
    assert float(LEVEL_PROBS[tree.levels[0]]) < 1.0
