"""Acceptance: which part of a draft is taken, and that sampling with drafts draws from the very same distribution."""

import itertools
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import accept
from draftstore.errors import DraftTreeError
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.fakes.acceptance import accept_greedy, accept_sampled
from tests.fakes.adversaries import Path, RandomTrees, tree_of
from tests.reference import (
    Model,
    Nodes,
    Warp,
    accept_per_path,
    chances_of,
    chi_square_p,
    joint_of_three,
    nodes_of,
    table_model,
    warped,
)
from tests.unit.trees.test_tree import tree_of as tree_from
from tests.unit.trees.test_tree import trees

SMALL = tree_of([(1, 2, 3), (1, 4), (5,), (5, 1, 2)])


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


@given(data=st.data(), tree=trees())
def test_greedy_takes_the_longest_part_that_agrees(data: st.DataObject, tree: DraftTree) -> None:
    known = sorted({*tree.tokens.tolist(), 3})
    choices = data.draw(st.lists(st.sampled_from(known), min_size=len(tree) + 1, max_size=len(tree) + 1))
    found = accept_greedy(tree, np.array(choices))
    assert tree.tokens[found.path].tolist() == found.tokens[:-1].tolist()
    assert [-1, *found.path[:-1]] == tree.parents[found.path].tolist() or found.path == []
    assert found.tokens.tolist() == [choices[0], *(choices[node + 1] for node in found.path)]
    assert tree.accepted(found.tokens) == found.path  # no child of the last node carries the bonus


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ({(): 1, (1,): 2, (1, 2): 3, (1, 2, 3): 9}, [(1,), (1, 2), (1, 2, 3)], [1, 2, 3, 9]),
        ({(): 1, (1,): 4, (1, 4): 2}, [(1,), (1, 4)], [1, 4, 2]),
        ({(): 5, (5,): 2}, [(5,)], [5, 2]),
        ({(): 3}, [], [3]),
        ({(): 2, (1,): 2}, [], [2]),  # 2 is drafted, elsewhere
    ],
)
def test_greedy_by_hand(choices: dict[Path, int], path: list[Path], tokens: list[int]) -> None:
    rows = [(), *reference.paths_of(nodes_of(SMALL))]
    found = accept_greedy(SMALL, np.array([choices.get(row, 7) for row in rows], np.int64))
    assert [rows[node + 1] for node in found.path] == path
    assert found.tokens.tolist() == tokens


def test_an_empty_tree_yields_one_token() -> None:
    found = accept_greedy(DraftTree.empty(), np.array([4]))
    assert (found.path, found.tokens.tolist()) == ([], [4])


def test_an_end_is_the_bonus_though_a_node_carries_it() -> None:
    found = accept(SMALL, lambda row, emitted: [1, 2, 3, 9][len(emitted)], lambda emitted: emitted[-1] == 2)
    assert (found.path, found.tokens.tolist()) == ([SMALL.path(0)[0]], [1, 2])
    found = accept(SMALL, lambda row, emitted: 1, lambda emitted: True)
    assert (found.path, found.tokens.tolist()) == ([], [1])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (tree_from([4, 4], [-1, -1], [0, 0]), "two children of node -1 carry the token 4"),
        (tree_from([4, 5, 6, 5], [-1, 0, 0, 0], [0, 0, 0, 0]), "two children of node 0 carry the token 5"),
        (tree_from([4, 5], [1, -1], [0, 0]), "node 0 has parent 1, expected -1 or an earlier node"),
        (tree_from([4, 5], [-1, 1], [0, 0]), "node 1 has parent 1, expected"),
        (tree_from([4, 5], [-1, -2], [0, 0]), "node 1 has parent -2, expected"),
        (tree_from([4], [-1, 0], [0]), "unequal lengths"),
        (tree_from([4, 5], [-1], [0, 0]), "unequal lengths"),
        (tree_from([4, 5], [-1, 0], [0]), "unequal lengths"),
    ],
)
def test_broken_trees_are_refused(tree: DraftTree, message: str) -> None:
    with pytest.raises(DraftTreeError, match=message):
        accept_greedy(tree, np.zeros(len(tree) + 1, np.int64))


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


class Drawing:
    """A generator that draws one number, always."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_probability_is_never_drawn(dtype: type[np.floating]) -> None:
    probs = np.array([[0.0, 0.3, 0.0, 0.7, 0.0]], dtype)
    for number, token in [(0.0, 1), (0.29, 1), (0.31, 3), (np.nextafter(1.0, 0.0), 3)]:
        draw = cast(np.random.Generator, Drawing(float(number)))
        assert accept_sampled(DraftTree.empty(), probs, draw).tokens.tolist() == [token]


# --- sampling: the exact joint of three tokens ---

VOCAB = 8
RUNS = 10_000
"""Enough: a draw for each path is found in 199 of 200 samples of every shape that branches, and so is the penalty of
another row where a penalty is tested and what is drafted is likely."""
PROMPT: Path = (3, 1)
CHECKED = 1e-4
"""Least p of a test that is passed. Seeds are fixed: what passes once passes always."""

SCORES = table_model(VOCAB, seed=2)

Drafts = Callable[[Path, Model], DraftTree]
Say = Callable[[np.random.Generator], Path]


def likely(text: Sequence[int], model: Model, count: int) -> list[int]:
    order: list[int] = np.argsort(-model(text), kind="stable").tolist()
    return order[:count]


def branches(text: Sequence[int], model: Model, widths: Sequence[int]) -> list[Path]:
    """Return the paths along the likeliest tokens, so many at each depth."""
    paths: list[Path] = [()]
    for width in widths:
        paths = [(*path, token) for path in paths for token in likely([*text, *path], model, width)]
    return paths


SHAPES: dict[str, Drafts] = {
    "chain": lambda text, model: tree_of(branches(text, model, [1, 1, 1, 1])),
    "star": lambda text, model: tree_of((token,) for token in range(VOCAB)),
    "two paths that share a token": lambda text, model: tree_of(branches(text, model, [1, 2])),
    "few tokens, many paths": lambda text, model: tree_of(branches(text, model, [2, 2, 2])),
    "every branch alike": lambda text, model: tree_of(itertools.product(range(3), repeat=3)),
    "the unlikely": lambda text, model: tree_of(
        (a, b) for a in likely(text, model, VOCAB)[-3:] for b in likely([*text, a], model, VOCAB)[-3:]
    ),
    "random": lambda text, model: RandomTrees(VOCAB, seed=5).session(text).propose(20),
}
WARPS = {
    "plain": Warp(),
    "temperature": Warp(temperature=0.6),
    "top-k": Warp(top_k=3),
    "top-p": Warp(top_p=0.8),
    "penalty": Warp(penalty=1.7),
    "all": Warp(temperature=1.4, top_k=6, top_p=0.9, penalty=1.3),
}
SHARED = "few tokens, many paths"
CASES = [
    *[(SHARED, warp) for warp in WARPS],
    ("chain", "plain"),
    ("star", "temperature"),
    ("two paths that share a token", "top-p"),
    ("every branch alike", "penalty"),
    ("the unlikely", "all"),
    ("random", "plain"),
]


def count(say: Say, runs: int = RUNS) -> NDArray[np.int64]:
    """Return how often each three tokens come first."""
    draw = np.random.default_rng(11)
    counts = np.zeros((VOCAB,) * 3, np.int64)
    for _ in range(runs):
        counts[say(draw)] += 1
    return counts


def decoder(drafts: Drafts, model: Model, row: Callable[[Path, Path], NDArray[np.float64]]) -> Say:
    """Return what decodes three tokens and more, with a new draft after every pass.

    Args:
        drafts: what is proposed.
        model: the chances of the next token, which drafts go by.
        row: the chances that a forward pass gives for the text before it and the path to a row.
    """
    passes: dict[Path, tuple[DraftTree, NDArray[np.float64]]] = {}

    def forward(text: Path) -> tuple[DraftTree, NDArray[np.float64]]:
        tree = drafts(text, model)
        return tree, np.array([row(text, path) for path in [(), *reference.paths_of(nodes_of(tree))]])

    def say(draw: np.random.Generator) -> Path:
        text = PROMPT
        while len(text) < len(PROMPT) + 3:
            if text not in passes:
                passes[text] = forward(text)
            text += tuple(accept_sampled(*passes[text], draw).tokens.tolist())
        return text[len(PROMPT) :][:3]

    return say


@pytest.mark.parametrize(("shape", "warp"), CASES)
def test_the_joint_of_three_tokens_is_exact(shape: str, warp: str) -> None:
    model = warped(SCORES, WARPS[warp])
    counts = count(decoder(SHAPES[shape], model, lambda text, path: model(text + path)))
    assert chi_square_p(counts, joint_of_three(model, PROMPT)) > CHECKED


def test_a_penalty_for_the_wrong_tokens_is_found_out() -> None:
    """Had every row the penalty of the root, what is drafted above a row would not count as said."""
    warp = WARPS["penalty"]
    model = warped(SCORES, warp)
    say = decoder(SHAPES[SHARED], model, lambda text, path: chances_of(SCORES(text + path), text, warp))
    assert chi_square_p(count(say), joint_of_three(model, PROMPT)) < CHECKED


# --- what is wrong with a draw for each path ---


def per_path(drafts: Drafts, model: Model) -> Say:
    """Return what decodes three tokens and more by the rule of published code."""
    known: dict[Path, Nodes] = {}

    def say(draw: np.random.Generator) -> Path:
        text = PROMPT
        while len(text) < len(PROMPT) + 3:
            if text not in known:
                known[text] = nodes_of(drafts(text, model))
            text += accept_per_path(known[text], model, text, draw)
        return text[len(PROMPT) :][:3]

    return say


@pytest.mark.parametrize("shape", ["star", "two paths that share a token", SHARED])
def test_the_same_test_finds_out_a_draw_for_each_path(shape: str) -> None:
    """Half of the runs is enough."""
    model = warped(SCORES, Warp())
    counts = count(per_path(SHAPES[shape], model), RUNS // 2)
    assert chi_square_p(counts, joint_of_three(model, PROMPT)) < CHECKED


# --- the test itself ---


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ([50, 50, 50], 1.0),
        ([60, 40, 50], np.exp(-2.0)),  # 2 degrees of freedom: the tail is exp(-x / 2), and x is 4
        ([50, 50, 30, 70, 50], np.exp(-8.0) * (1 + 8.0)),  # 4 degrees, x is 16
    ],
)
def test_the_chi_square_test_by_hand(counts: list[int], p: float) -> None:
    even = np.full(len(counts), 1 / len(counts))
    assert chi_square_p(np.array(counts), even) == pytest.approx(p)


def test_the_chi_square_test_pools_what_is_rare_and_knows_the_impossible() -> None:
    expected = np.array([0.5, 0.3, 0.15, 0.04, 0.005, 0.005, 0.0])
    assert chi_square_p(np.array([51, 30, 14, 5, 0, 0, 0]), expected) == pytest.approx(
        np.exp(-(1 / 20 + 1 / 50) / 2)
    )
    assert chi_square_p(np.array([50, 30, 15, 4, 0, 0, 1]), expected) == 0.0
    assert chi_square_p(np.array([30, 50, 15, 4, 1, 0, 0]), expected) < CHECKED


def test_p_is_evenly_spread_where_the_chances_are_right() -> None:
    draw = np.random.default_rng(0)
    probs = draw.dirichlet(np.full(40, 0.5))
    values = [chi_square_p(draw.multinomial(2_000, probs), probs) for _ in range(400)]
    for bound in (0.1, 0.5, 0.9):
        assert np.mean(np.array(values) < bound) == pytest.approx(bound, abs=0.08)
