import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.trees.frontier import (
    MAX_BUDGET,
    MAX_DEPTH,
    Frontier,
    depth_of,
    enter,
    may_have_children,
    new_frontier,
    parent_of,
    token_of,
    unpack_nodes,
)
from draftstore.trees.tree import LEVEL_BOUNDS, LEVEL_PROBS, level_of

Row = tuple[int, int, int, int]
"""Level, depth, token, slot of the parent: the order of nodes."""

ROWS = st.tuples(
    st.integers(0, 255),
    st.integers(1, MAX_DEPTH),
    st.sampled_from([0, 1, 65_535, 151_664, 2**31 - 1]),
    st.integers(0, MAX_BUDGET),
)


def rows_of(nodes: Frontier, size: int) -> list[Row]:
    tokens, parents = np.empty(size, np.int32), np.empty(size, np.int16)
    levels = np.empty(size, np.uint8)
    unpack_nodes(nodes, size, tokens, parents, levels)
    found = zip(levels.tolist(), tokens.tolist(), parents.tolist(), strict=True)
    return [
        (level, int(depth_of(nodes, i)), token, parent + 1) for i, (level, token, parent) in enumerate(found)
    ]


def fill(rows: list[Row], budget: int, max_level: int = 255) -> tuple[Frontier, int]:
    nodes, tail = new_frontier(budget), 0
    for level, depth, token, parent in rows:
        tail = enter(nodes, tail, token, float(LEVEL_PROBS[level]), depth, parent, max_level)
    return nodes, tail


@given(st.lists(ROWS, max_size=40, unique=True), st.integers(1, 12), st.integers(0, 255))
def test_the_best_nodes_stay_in_order(rows: list[Row], budget: int, max_level: int) -> None:
    nodes, tail = fill(rows, budget, max_level)
    expected = sorted(row for row in rows if row[0] <= max_level)[:budget]
    assert rows_of(nodes, tail) == expected
    assert [int(token_of(nodes, i)) for i in range(tail)] == [row[2] for row in expected]
    assert [int(parent_of(nodes, i)) for i in range(tail)] == [row[3] for row in expected]
    assert nodes.probs[:tail].tolist() == [float(LEVEL_PROBS[row[0]]) for row in expected]


def test_every_bound_of_the_grid_rounds_as_trees_do() -> None:
    """The logarithm in the kernel only guesses; what counts is on which side of a bound a probability lies."""
    for bound in LEVEL_BOUNDS.tolist():
        for prob in (bound, np.nextafter(bound, 0), np.nextafter(bound, 1), min(bound * 1.05, 1.0)):
            nodes, tail = new_frontier(1), 0
            tail = enter(nodes, tail, 7, float(prob), 1, 0, 255)
            level = level_of(prob)
            assert rows_of(nodes, tail) == ([(level, 1, 7, 0)] if level < 256 else [])


@pytest.mark.parametrize("prob", [0.0, 5e-324, 1e-30, float(np.nextafter(LEVEL_BOUNDS[-1], 0))])
def test_probability_below_the_grid_is_dropped(prob: float) -> None:
    assert enter(new_frontier(2), 0, 7, prob, 1, 0, 255) == 0
    nodes, tail = fill([(0, 1, 1, 0)], 1)
    assert enter(nodes, tail, 7, prob, 1, 0, 255) == 1


def test_node_is_expanded_while_a_child_could_enter() -> None:
    nodes, tail = fill([(3, 1, 5, 0), (9, 1, 5, 0)], 3)
    assert may_have_children(nodes, 1, tail)
    nodes, tail = fill([(3, 1, 5, 0), (9, 1, 5, 0), (9, 2, 5, 1)], 3)
    assert may_have_children(nodes, 0, tail)
    # Token 0 under the last parent but one would still come before the last node.
    assert may_have_children(nodes, 1, tail)
    assert not may_have_children(nodes, 2, tail)
