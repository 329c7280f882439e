from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Step, Tally, Text, decode
from draftstore.decoding.planners import Fixed
from draftstore.drafting.drafter import Drafter, Session
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.recycling.drafter import WINDOW, RecyclingDrafter
from draftstore.recycling.paths import GUESS_PRIOR, PATHS, PRIOR, PRIOR_TRIES, SHARED_TRIES
from draftstore.trees.tree import DraftTree, highest_level
from tests import reference
from tests.reference import Nodes, Rows, UnclearError, nodes_of, paths_of
from tests.unit.trees.test_blend import blended

VOCAB = 7
candidates = st.lists(st.integers(-1, VOCAB + 1), max_size=8).map(lambda row: [*row, *[-1] * (8 - len(row))])


def rows_of(drafter: RecyclingDrafter) -> Rows:
    return {token: row for token, row in enumerate(drafter.matrix.tolist()) if row != [-1] * 8}


def counts_of(drafter: RecyclingDrafter) -> dict[str, tuple[int, int]]:
    return {
        path: (tries, hits) for path, (tries, hits) in zip(PATHS, drafter.counts.T.tolist(), strict=False)
    }


def guesses_of(drafter: RecyclingDrafter) -> list[list[int]]:
    return drafter.counts[:, len(PATHS) :].T.tolist()  # type: ignore[no-any-return]


def chances_of(counts: dict[str, tuple[int, int]]) -> dict[str, float]:
    """Estimate every path's chance from the counts of all, as the module of static trees says."""
    rates = []
    for rank, prior in enumerate(PRIOR.tolist()):
        pairs = [pair for path, pair in counts.items() if path[-1] == str(rank)]
        tries, hits = (sum(pair[column] for pair in pairs) for column in (0, 1))
        rates.append((hits + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES))
    chances = {"": 1.0}
    for path in sorted(counts, key=len):
        tries, hits = counts[path]
        rate = (hits + SHARED_TRIES * rates[int(path[-1])]) / (tries + SHARED_TRIES)
        chances[path] = chances[path[:-1]] * rate
    del chances[""]
    return chances


def cells(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    widest = max(map(len, rows))
    return np.array([[*row, *[-1] * (widest - len(row))] for row in rows], np.int32)


# --- drafts and updates, against the oracle ---


@st.composite
def feedback(draw: st.DrawFn, tree: DraftTree) -> tuple[DraftTree | None, list[int]]:
    """Draw what a pass verified, and what the text grew by: the draft whole or cut, merged with another, or none."""
    kind = draw(st.sampled_from(["whole", "cut", "merged", "none"]))
    if kind == "none":
        return None, [draw(st.integers(0, VOCAB - 1))]
    verified = tree
    if kind == "cut":
        verified = tree.prefix(draw(st.integers(0, len(tree))))
    if kind == "merged":
        others = reference.heaviest(
            {(token,): 0.3 / (token + 1) for token in draw(st.sets(st.integers(0, VOCAB - 1)))}, 9, 9, 255
        )
        verified = merge(nodes_of(tree), others)
    node, accepted = -1, []
    while draw(st.booleans()):
        children = np.flatnonzero(verified.parents == node).tolist()
        if not children:
            break
        node = draw(st.sampled_from(children))
        accepted.append(int(verified.tokens[node]))
    return verified, [*accepted, draw(st.integers(0, VOCAB - 1))]


def merge(*trees: Nodes) -> DraftTree:
    return blended(trees, [0.5] * len(trees), 90)


@given(data=st.data(), last=st.integers(0, VOCAB - 1))
def test_sessions_draft_and_learn_as_the_oracle_does(data: st.DataObject, last: int) -> None:
    drafter = RecyclingDrafter(VOCAB)
    rows: Rows = {}
    counts = counts_of(drafter)
    session = drafter.session([last])
    before, guessed = [-1] * 8, [(0, 0)] * 8
    for _ in range(data.draw(st.integers(1, 5))):
        budget = data.draw(st.sampled_from([1, 5, 30, 80, 200]))
        tree = session.propose(budget)
        guesses = reference.guesses_of(rows, last, before, VOCAB)
        rates = [
            (hits + PRIOR_TRIES * prior) / (tries + PRIOR_TRIES)
            for prior, (tries, hits) in zip(GUESS_PRIOR.tolist(), guessed, strict=True)
        ]
        try:
            assert nodes_of(tree) == reference.fill_static_tree(
                rows, last, chances_of(counts), budget, guesses=list(zip(guesses, rates, strict=True))
            )
        except UnclearError:
            reject()
        tree.validate()
        verified, accepted = data.draw(feedback(tree))
        top = [data.draw(candidates) for _ in range(1 + len(verified or ()))]
        known = data.draw(st.booleans())
        session.observe(accepted, tree=verified, candidates=cells(top) if known else None)
        if verified is not None or known:
            counts = reference.count_ranks(rows, last, accepted, counts)
            guessed = [
                pair if guess < 0 else (pair[0] + 1, pair[1] + (guess == accepted[0]))
                for pair, guess in zip(guessed, guesses, strict=True)
            ]
        before = [-1] * 8
        if known:
            reference.recycle(rows, last, accepted, nodes_of(verified or DraftTree.empty()), top, VOCAB)
            before = rows.get([last, *accepted][-2], before)
        assert rows_of(drafter) == rows
        assert counts_of(drafter) == counts
        assert guesses_of(drafter) == [list(pair) for pair in guessed]
        last = accepted[-1]


@given(st.lists(candidates, min_size=VOCAB, max_size=VOCAB), st.integers(0, VOCAB - 1), st.integers(0, 99))
def test_a_smaller_budget_keeps_the_best_nodes(matrix: list[list[int]], last: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafter = RecyclingDrafter(VOCAB, matrix=cells(matrix))
    drafter.counts[0] = rng.integers(0, 500, drafter.counts.shape[1])
    drafter.counts[1] = rng.integers(0, 1 + drafter.counts[0])
    session = drafter.session([last])
    whole = session.propose(80)
    for budget in range(81):
        assert session.propose(budget) == whole.prefix(min(budget, len(whole)))
    for least in (1.0, 0.3, 0.1, 0.01):
        kept = int(np.count_nonzero(whole.levels <= highest_level(least)))
        assert session.propose(80, least) == whole.prefix(kept)


def full_matrix(vocab_size: int, seed: int = 0) -> NDArray[np.int32]:
    """Return candidates for every token, none its own candidate's twin."""
    rng = np.random.default_rng(seed)
    few = np.stack([rng.permutation(vocab_size)[:8] for _ in range(300)]).astype(np.int32)
    return np.resize(few, (vocab_size, 8))


def test_a_full_matrix_fills_the_whole_tree() -> None:
    matrix = full_matrix(70_000)
    tree = RecyclingDrafter(70_000, matrix=matrix).session([5]).propose(4096)
    tree.validate()
    assert np.bincount(tree.depths).tolist() == [0, 8, 21, 25, 15, 8, 3]
    assert sorted(tree.tokens[tree.parents == -1]) == sorted(matrix[5])


def test_an_empty_cell_cuts_what_is_below_it() -> None:
    rows = [[1, -1, 2], [-1, 0], [-1] * 3, [0, 1, 2]]
    drafter = RecyclingDrafter(4, matrix=cells(rows))
    paths = {tuple(path) for path in paths_of(nodes_of(drafter.session([0]).propose(80)))}
    # Of the root the paths 0 and 2, of 0 the path 01, of 01 again 0 and 2; 0100 is empty.
    assert paths == {(1,), (2,), (1, 0), (1, 0, 1), (1, 0, 2)}
    assert len(drafter.session([2]).propose(80)) == 0
    assert len(RecyclingDrafter(4).session([2]).propose(80)) == 0
    assert len(drafter.session([]).propose(80)) == 0


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


# --- which occurrence of a token wins ---


def wide(first: int) -> list[int]:
    return [first, *range(20, 27)]


def tree_of(*nodes: tuple[int, int]) -> DraftTree:
    tokens, parents = zip(*nodes, strict=True)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int16), np.arange(len(nodes), dtype=np.uint8)
    )


TWICE = tree_of((5, -1), (6, -1), (5, 1), (5, 2), (7, 0))
"""5 stands at the nodes 0, 2 and 3, along 6 5 5; 7 below the first."""


@pytest.mark.parametrize(
    ("accepted", "row_of_5"),
    [
        ([9], 3),  # all rejected: the last
        ([5, 9], 0),  # the accepted one, though others follow
        ([6, 5, 9], 2),
        ([6, 5, 5, 9], 3),  # of two accepted ones the last
        ([6, 5, 5], 3),  # ended there: the model said it all the same
        ([5], 0),
    ],
)
def test_an_accepted_occurrence_wins_then_the_last(accepted: list[int], row_of_5: int) -> None:
    for _ in range(2):
        drafter = RecyclingDrafter(30)
        session = drafter.session([8])
        top = cells([wide(10), *(wide(11 + node) for node in range(5))])
        session.observe(accepted, tree=TWICE, candidates=top)
        found = {token: row[0] for token, row in rows_of(drafter).items()}
        assert found == {8: 10, 5: 11 + row_of_5, 6: 12, 7: 15}


def test_the_root_is_an_accepted_occurrence() -> None:
    drafter = RecyclingDrafter(30)
    drafter.session([5]).observe([9], tree=TWICE, candidates=cells([wide(10 + row) for row in range(6)]))
    assert drafter.matrix[5, 0] == 10
    drafter.session([5]).observe([5, 9], tree=TWICE, candidates=cells([wide(10 + row) for row in range(6)]))
    assert drafter.matrix[5, 0] == 11, "an accepted node comes after the root"


def test_empty_row_is_skipped() -> None:
    drafter = RecyclingDrafter(5, matrix=cells([[1, 2], [3, 4]]))
    drafter.session([0]).observe([2], tree=DraftTree.empty(), candidates=cells([[-1, 7, 5]]))
    assert drafter.matrix[0].tolist() == [1, 2, -1, -1, -1, -1, -1, -1]
    drafter.session([0]).observe([2], candidates=cells([[4]]))
    assert drafter.matrix[0].tolist() == [4, -1, -1, -1, -1, -1, -1, -1]


# --- what is counted ---


def test_paths_are_counted_as_far_as_the_text_follows_them() -> None:
    drafter = RecyclingDrafter(9, matrix=cells([[1, 2, 3], [4, 5, -1], [6, -1, 7], [-1] * 3, [8, -1, -1]]))
    session = drafter.session([0])
    session.observe([2, 6, 3], tree=session.propose(2))
    tried = {path: pair for path, pair in counts_of(drafter).items() if pair[0]}
    # 0, 1, 2 of the root; of 2 the cells 10 and 12 hold tokens; of 6 nothing is known.
    assert tried == {"0": (1, 0), "1": (1, 1), "2": (1, 0), "10": (1, 1), "12": (1, 0)}
    session.observe([4])
    assert counts_of(drafter)["0"] == (1, 0), "no pass, nothing to count"
    session = drafter.session([0])
    session.observe([1, 4, 8], tree=DraftTree.empty())
    tried = {path: pair for path, pair in counts_of(drafter).items() if pair[0] and path[0] == "0"}
    assert tried == {"0": (2, 1), "00": (1, 1), "01": (1, 0), "000": (1, 1)}


def test_nodes_follow_the_rates() -> None:
    drafter = RecyclingDrafter(20, matrix=cells([list(range(1, 9))]))
    session = drafter.session([0])
    assert session.propose(8).tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(200):
        session.observe([3], tree=session.propose(1))
        session = drafter.session([0])
    tree = session.propose(8)
    assert tree.tokens[0] == 3
    assert tree.probs[0] > 0.8
    assert session.propose(1).tokens.tolist() == [3]


def test_counts_are_halved_so_that_rates_follow_the_texts() -> None:
    drafter = RecyclingDrafter(9, matrix=cells([[1, 2]]))
    for token, column in (1, 0), (2, 1):
        for _ in range(3 * WINDOW):
            drafter.session([0]).observe([token], tree=DraftTree.empty())
        assert drafter.counts.max() < 2 * WINDOW
        assert np.all(drafter.counts[1] <= drafter.counts[0])
        assert drafter.session([0]).propose(1).tokens.tolist() == [[1, 2][column]]


# --- guesses ---


def test_candidates_are_guessed_one_token_later() -> None:
    drafter = RecyclingDrafter(30, matrix=cells([[-1]] * 7 + [[5, 6]]))
    session = drafter.session([3, 4], candidates=cells([[4, 7, 9]]))
    assert set(session.propose(2).tokens.tolist()) == {7, 9}, "4 is what the model said"
    tree = session.propose(8)
    assert sorted(map(tuple, paths_of(nodes_of(tree)))) == [(7,), (7, 5), (7, 6), (9,)]
    assert tree.probs[0] < 0.1
    session.observe([8], tree=tree, candidates=cells([[8, 20, 4]] + [[-1]] * 4))
    tree = session.propose(8)
    assert sorted(tree.tokens[tree.parents == -1].tolist()) == [4, 20]
    assert guesses_of(drafter)[:3] == [[0, 0], [1, 0], [1, 0]]


def test_candidate_of_the_last_token_is_not_guessed() -> None:
    drafter = RecyclingDrafter(30, matrix=cells([[-1]] * 4 + [[9, 1]]))
    tree = drafter.session([3, 4], candidates=cells([[4, 7, 9]])).propose(8)
    assert sorted(tree.tokens.tolist()) == [1, 7, 9]
    tree.validate()


def test_guesses_are_those_of_one_text() -> None:
    drafter = RecyclingDrafter(30)
    session = drafter.session([3, 4], candidates=cells([[4, 7]]))
    assert len(drafter.session([3, 4]).propose(8)) == 0, "nobody knows what it was"
    drafter.session([3, 4], candidates=cells([[4, 9]]))
    assert session.propose(8).tokens.tolist() == [7]
    session.observe([5], tree=DraftTree.empty())
    assert len(session.propose(8)) == 0


def test_the_rate_of_a_guess_is_learned() -> None:
    drafter = RecyclingDrafter(30)
    for _ in range(300):
        session = drafter.session([3, 4], candidates=cells([[4, 7, 9]]))
        session.observe([9], tree=DraftTree.empty())
    tree = drafter.session([3, 4], candidates=cells([[4, 7, 9]])).propose(8)
    assert tree.tokens.tolist() == [9, 7]
    assert tree.probs[0] > 0.8


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


def test_sessions_share_what_they_learn() -> None:
    drafter = RecyclingDrafter(30)
    first, second = drafter.session([4]), drafter.session([4])
    first.observe([5], tree=DraftTree.empty(), candidates=cells([wide(9)]))
    assert second.propose(1).tokens.tolist() == [9]
    assert (first.needs_candidates, first.needs_hidden) == (True, False)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([30], "token id 30 is outside the model's vocabulary of 30 ids"), ([1, -1], "-1"), ([0.5], "float64")],
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


@pytest.mark.parametrize("wrong", [np.zeros((1, 8), np.int32), np.zeros(8, np.int32), np.zeros((6, 8))])
def test_candidates_of_another_shape_are_refused(wrong: NDArray[Any]) -> None:
    session = RecyclingDrafter(30).session([0])
    with pytest.raises(DraftstoreError, match=r"candidates are int32 \[6, 8\], found"):
        session.observe([1], tree=TWICE, candidates=wrong)
    if wrong.ndim == 1:
        with pytest.raises(DraftstoreError, match=r"int32 \[any, 8\], found an array of shape \(8,\)"):
            RecyclingDrafter(30).session([0, 1], candidates=wrong)


def test_invalid_arguments_are_refused() -> None:
    for budget in (-1, 4097):
        with pytest.raises(DraftstoreError, match="expected 0 to 4096"):
            RecyclingDrafter(9).session([0]).propose(budget)
    for size in (0, 2**31):
        with pytest.raises(DraftstoreError, match="a vocabulary of"):
            RecyclingDrafter(size)


def test_threads_may_share_a_drafter() -> None:
    drafter = RecyclingDrafter(40)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        session = drafter.session([seed])
        for _ in range(300):
            tree = session.propose(80)
            tree.validate()
            top = np.argsort(rng.random((len(tree) + 1, 40)), axis=1)[:, :8].astype(np.int32)
            session.observe(rng.integers(0, 40, 2), tree=tree, candidates=top)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all(len({*row}) == 8 for row in drafter.matrix.tolist() if row[0] >= 0)


# --- decoding ---


class TableTarget:
    """A target that says what a table of scores says of the last token, and its top 8."""

    def __init__(self, scores: NDArray[np.float64], last: int) -> None:
        self.rank(scores)
        self.last = last

    def rank(self, scores: NDArray[np.float64]) -> None:
        self.top = np.argsort(-scores, axis=1, kind="stable")[:, :8].astype(np.int32)

    def verify(self, trees: Sequence[DraftTree]) -> list["TableTarget"]:
        self.rows = self.top[[self.last, *trees[0].tokens.tolist()]]
        return [self]

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        return int(self.rows[row, 0])

    def candidates(self) -> NDArray[np.int32]:
        return self.rows

    def hidden(self, row: int) -> None:
        return None

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        assert accepted[0] is not None
        self.last = int(accepted[0].tokens[-1])


def run(target: TableTarget, session: Session, passes: int) -> tuple[Tally, Step]:
    tally = Tally()
    for step in decode(target, Text(session, Fixed(80), lambda _: False)):
        tally.add(step)
        if tally.passes == passes:
            break
    return tally, step


def test_a_cycle_is_learned_in_one_round() -> None:
    order = np.random.default_rng(3).permutation(50)
    scores = np.random.default_rng(4).random((50, 50))
    scores[order, np.roll(order, -1)] = 2.0
    drafter: Drafter = RecyclingDrafter(50)
    target = TableTarget(scores, int(order[0]))
    session = drafter.session([int(order[0])])
    cold, _ = run(target, session, 50)
    hot, step = run(target, session, 50)
    assert target.last == order[(cold.tokens + hot.tokens) % 50]
    following = np.roll(order, -1 - int(np.flatnonzero(order == step.tree.tokens[0])[0]) + 1)
    assert step.tokens.tolist() == following[:7].tolist()
    assert 1.0 < cold.accepted_length < 7.0, "guesses that come false tell of tokens to come"
    assert hot.accepted_length == 7.0, "six layers and the bonus"
    assert run(target, drafter.session([target.last]), 50)[0].accepted_length == 7.0, (
        "the next text starts hot"
    )


def test_acceptance_rises_and_runs_are_alike() -> None:
    scores = np.random.default_rng(0).normal(size=(60, 60))

    def decode_texts() -> tuple[list[float], DraftTree]:
        rng = np.random.default_rng(1)
        drafter = RecyclingDrafter(60)
        lengths = []
        for _ in range(4):
            target = TableTarget(scores, int(rng.integers(60)))
            session = drafter.session([target.last])
            tally = Tally()
            for _ in range(
                40
            ):  # scores change from pass to pass: the first candidate often is not what follows
                target.rank(scores + rng.normal(0.0, 0.3, scores.shape))
                tally.add(run(target, session, 1)[1])
            lengths.append(tally.accepted_length)
        return lengths, session.propose(80)

    lengths, tree = decode_texts()
    assert (lengths, tree) == decode_texts()
    assert lengths[-1] > lengths[0] + 0.5
    assert lengths[-1] > 2.0
