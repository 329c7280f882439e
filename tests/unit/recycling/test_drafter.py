import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.recycling.kernels import GUESS_RATES, PATHS, RATES
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests import reference
from tests.reference import Rows, UnclearError, nodes_of
from tests.unit.trees.test_tree import trees

VOCAB = 7
ids = st.integers(0, VOCAB - 1)
candidates = st.lists(st.integers(-1, VOCAB + 1), max_size=8).map(lambda row: [*row, *[-1] * (8 - len(row))])


def rows_of(drafter: RecyclingDrafter) -> Rows:
    return {token: row for token, row in enumerate(drafter.matrix.tolist()) if row != [-1] * 8}


CHANCES = {path: math.prod(float(RATES[int(rank)]) for rank in path) for path in PATHS}


def cells(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    widest = max(map(len, rows))
    return np.array([[*row, *[-1] * (widest - len(row))] for row in rows], np.int32)


# --- drafts and updates, against the oracle ---


@given(data=st.data(), last=st.integers(0, VOCAB - 1))
def test_sessions_draft_and_learn_as_the_oracle_does(data: st.DataObject, last: int) -> None:
    drafter = RecyclingDrafter(VOCAB)
    rows: Rows = {}
    session = drafter.session([last])
    before = [-1] * 8
    for _ in range(data.draw(st.integers(1, 5))):
        budget, max_level = data.draw(st.sampled_from([(80, 255), (1, 255), (5, 255), (30, 255), (200, 60)]))
        tree = session.propose(budget, float(LEVEL_PROBS[max_level]))
        guesses = reference.guesses_of(rows, last, before, VOCAB)
        try:
            assert nodes_of(tree) == reference.fill_static_tree(
                rows, last, CHANCES, budget, max_level, list(zip(guesses, GUESS_RATES.tolist(), strict=True))
            )
        except UnclearError:
            reject()
        tree.validate()
        verified = data.draw(st.sampled_from([tree, tree.prefix(len(tree) // 2), None]) | trees(9, ids=ids))
        path = [] if verified is None else verified.path(data.draw(st.integers(-1, len(verified) - 1)))
        accepted = [*(() if verified is None else verified.tokens[path].tolist()), data.draw(ids)]
        top = [data.draw(candidates) for _ in range(1 + len(verified or ()))]
        known = data.draw(st.booleans())
        session.observe(accepted, tree=verified, candidates=cells(top) if known else None)
        before = [-1] * 8
        if known:
            reference.recycle(rows, last, accepted, nodes_of(verified or DraftTree.empty()), top, VOCAB)
            before = rows.get([last, *accepted][-2], before)
        assert rows_of(drafter) == rows
        last = accepted[-1]


def test_a_full_matrix_fills_the_whole_tree() -> None:
    rng = np.random.default_rng(0)
    few = np.stack([rng.permutation(70_000)[:8] for _ in range(300)]).astype(np.int32)
    drafter = RecyclingDrafter(70_000, matrix=np.resize(few, (70_000, 8)))
    tree = drafter.session([5]).propose(4096)
    tree.validate()
    assert np.bincount(tree.depths).tolist() == [0, 8, 21, 25, 15, 8, 3]
    assert sorted(tree.tokens[tree.parents == -1]) == sorted(few[5])


def test_the_rows_of_a_matrix_hold_each_id_once() -> None:
    rows = [[3, 3, 1, 9, -5, 1, 2, 3], [4, 1], [0] * 8]
    drafter = RecyclingDrafter(5, matrix=np.array([*rows[:1], [4, 1] + [-1] * 6, rows[2]]))
    assert drafter.matrix[:3].tolist() == [
        [3, -1, 1, -1, -1, -1, 2, -1],
        [4, 1, -1, -1, -1, -1, -1, -1],
        [0, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert np.all(drafter.matrix[3:] == -1)
    with pytest.raises(ValueError, match="read-only"):
        drafter.matrix[0, 0] = 1


def wide(first: int) -> list[int]:
    return [first, *range(20, 27)]


def tree_of(*nodes: tuple[int, int]) -> DraftTree:
    tokens, parents = zip(*nodes, strict=True)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int16), np.arange(len(nodes), dtype=np.uint8)
    )


def test_guesses_are_those_of_one_text() -> None:
    drafter = RecyclingDrafter(30)
    session = drafter.session([3, 4], candidates=cells([[4, 7]]))
    assert len(drafter.session([3, 4]).propose(8)) == 0, "nobody knows what it was"
    drafter.session([3, 4], candidates=cells([[4, 9]]))
    assert session.propose(8).tokens.tolist() == [7]
    session.observe([5], tree=DraftTree.empty())
    assert len(session.propose(8)) == 0


# --- sessions ---


def test_prefill_candidates_are_learned() -> None:
    drafter = RecyclingDrafter(30)
    drafter.session([3, 4, 5], candidates=cells([wide(1)]))
    assert {token: row[0] for token, row in rows_of(drafter).items()} == {4: 1}
    drafter.session([3, 4, 3, 5], candidates=cells([wide(7), wide(8), wide(9)]))
    assert {token: row[0] for token, row in rows_of(drafter).items()} == {3: 9, 4: 8}
    drafter.session([6, 5], candidates=cells([wide(1), wide(2), wide(3)]))
    assert drafter.matrix[6, 0] == 3
    RecyclingDrafter(30).session([5], candidates=cells([wide(1)]))
    RecyclingDrafter(30).session([], candidates=cells([wide(1)]))


def test_sessions_share_one_matrix() -> None:
    drafter = RecyclingDrafter(30)
    first, second = drafter.session([4]), drafter.session([4])
    first.observe([5], tree=DraftTree.empty(), candidates=cells([wide(9)]))
    assert second.propose(1).tokens.tolist() == [9]
    assert (first.needs_candidates, first.needs_hidden) == (True, False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([30], "token id 30 is outside the drafter's vocabulary of 30 ids"), ([1, -1], "-1")],
)
def test_foreign_ids_are_refused(ids: list[Any], message: str) -> None:
    drafter = RecyclingDrafter(30, matrix=cells([[1]]))
    with pytest.raises(TokenRangeError, match=message):
        drafter.session(ids)
    session = drafter.session([0])
    with pytest.raises(TokenRangeError, match=message):
        session.observe(ids)
    assert session.propose(1).tokens.tolist() == [1], "the text has not grown"


def test_foreign_ids_of_a_tree_are_skipped() -> None:
    drafter = RecyclingDrafter(4)
    tree = tree_of((99, -1), (2, 0), (1, 7), (3, -1))
    drafter.session([0]).observe([3, 1], tree=tree, candidates=cells([[row] for row in (1, 2, 3, 0, 1)]))
    assert {token: row[0] for token, row in rows_of(drafter).items()} == {0: 1, 2: 3, 1: 0, 3: 1}


@pytest.mark.parametrize("wrong", [np.zeros((1, 8), np.int32), np.zeros(8, np.int32), np.zeros((3, 8))])
def test_candidates_of_another_shape_are_refused(wrong: NDArray[Any]) -> None:
    session = RecyclingDrafter(30).session([0])
    with pytest.raises(DraftstoreError, match=r"candidates must be int32 \[3, 8\], found"):
        session.observe([1], tree=tree_of((5, -1), (6, -1)), candidates=wrong)
    with pytest.raises(DraftstoreError, match=r"int32 \[any, 8\], found an array of shape \(8,\)"):
        RecyclingDrafter(30).session([0, 1], candidates=np.zeros(8, np.int32))
