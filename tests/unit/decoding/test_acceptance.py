"""Acceptance: which part of a draft is accepted, and that sampling with drafts keeps the distribution."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.errors import DraftTreeError
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.fakes.adversaries import Path
from tests.reference import nodes_of
from tests.unit.trees.test_tree import tree_of as tree_from
from tests.unit.trees.test_tree import trees


def accept_sampled(
    tree: DraftTree, probs: NDArray[np.floating], generator: np.random.Generator
) -> Acceptance:
    """Walk a tree along tokens drawn from distributions [n + 1, vocabulary], one draw a visited node."""

    def draw(row: int, _emitted: Sequence[int]) -> int:
        sums = probs[row].cumsum(dtype=np.float64)
        return int(sums.searchsorted(generator.random() * sums[-1], side="right"))

    return accept(tree, draw)


# --- the walk ---


@given(data=st.data(), tree=trees(), last=st.integers(1, 8))
def test_the_walk_is_that_of_the_oracle(data: st.DataObject, tree: DraftTree, last: int) -> None:
    """The model says mostly what the tree holds; it is asked once for each token, at the row of what it has said."""
    nodes = nodes_of(tree)
    paths = list(reference.paths_of(nodes))
    says: dict[Path, int] = {}

    def say(said: Path) -> int:
        if said not in says:
            held = [path[-1] for path in paths if path[:-1] == said]
            says[said] = data.draw(st.sampled_from([*held, 6, 2**31 - 2]))
        return says[said]

    asked: list[Path] = []
    ended: list[Path] = []

    def choose(row: int, emitted: Sequence[int]) -> int:
        asked.append(tuple(emitted))
        assert row == (paths.index(asked[-1]) + 1 if emitted else 0)
        return say(asked[-1])

    def ends(emitted: Sequence[int]) -> bool:
        ended.append(tuple(emitted))
        return len(emitted) == last

    said, held = reference.emitted(nodes, say, lambda text: len(text) == last)
    found = accept(tree, choose, ends)
    assert (tuple(found.tokens.tolist()), found.path) == (said, held)
    assert len(found.tokens) == len(found.path) + 1
    assert found.tokens.dtype == np.int32
    assert asked == [said[:size] for size in range(len(said))]
    assert ended == [said[:size] for size in range(1, len(said) + 1)]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_from([4, 4], [-1, -1], [0, 0]), "two children of node -1 carry the token 4"),
        (tree_from([4, 5, 6, 5], [-1, 0, 0, 0], [0, 0, 0, 0]), "two children of node 0 carry the token 5"),
        (tree_from([4, 5], [-1, 1], [0, 0]), "node 1 has parent 1, expected -1 or an earlier node"),
        (tree_from([4, 5], [-1, -2], [0, 0]), "node 1 has parent -2, expected"),
        (tree_from([4], [-1, 0], [0]), "unequal lengths"),
        (tree_from([4, 5], [-1, 0], [0]), "unequal lengths"),
    ],
)
def test_broken_trees_are_refused(tree: DraftTree, message: str) -> None:
    with pytest.raises(DraftTreeError, match=message):
        accept(tree, lambda row, emitted: 0)


# --- sampling: one draw a token ---


@given(tree=trees(12), seed=st.integers(0, 2**32), zeros=st.integers(0, 5))
def test_samples_do_not_depend_on_the_draft(tree: DraftTree, seed: int, zeros: int) -> None:
    """The draws of the walk are those of plain sampling, in the same order and of the same number."""
    tree = DraftTree(tree.tokens % 6, tree.parents, tree.levels)
    paths = reference.paths_of(nodes_of(tree))
    if len(paths) < len(tree):
        return  # two siblings became the same token
    weights = np.random.default_rng(seed).random((7**2, 6))
    weights[:, :zeros] = 0.0

    def model(said: Sequence[int]) -> NDArray[np.float64]:
        row = weights[hash(tuple(said)) % len(weights)]
        return np.asarray(row / row.sum())

    drafted, plain = np.random.default_rng(seed), np.random.default_rng(seed)
    found = accept_sampled(tree, np.array([model(path) for path in [(), *paths]]), drafted)
    said: list[int] = []
    for _ in found.tokens:
        said.append(int(plain.choice(6, p=model(said))))
    assert found.tokens.tolist() == said
    assert drafted.random() == plain.random()
