"""The choice between the store's chain and another drafter's: by what became of both."""

import numpy as np
import pytest

from draftstore.engines.beside import Contest, LengthChances, Trust, expected_length, outcomes
from draftstore.trees.tree import DraftTree, level_of

CHAIN = 4


def chain(tokens: list[int], prob: float) -> DraftTree:
    """Return a chain of which each token holds with a probability if those before it do."""
    levels = [level_of(prob ** (place + 1)) for place in range(len(tokens))]
    return DraftTree(
        np.array(tokens, np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int16), np.array(levels, np.uint8)
    )


def test_outcomes_end_at_the_first_wrong_token_and_at_the_end_of_what_is_known() -> None:
    assert outcomes([1, 2, 3], [1, 9, 3]) == [True, False]
    assert outcomes([1, 2, 3], [1, 2]) == [True, True]
    assert outcomes([1], [1, 2]) == [True]
    assert outcomes([], [1]) == []


def test_expected_lengths_are_sums_of_products() -> None:
    assert expected_length(np.array([0.5, 0.5, 1.0])) == 1.0
    assert expected_length(np.empty(0)) == 0.0


def play(
    contest: Contest, steps: int, hits: tuple[float, float], prob: float, *, seed: int = 0
) -> list[bool]:
    """Let both drafters be right with some probability a token; return whose chain was chosen, ours as True."""
    salad = np.random.default_rng(seed)
    text, chosen = [0], []
    for _ in range(steps):
        coming = salad.integers(10, 100, CHAIN + 1).tolist()
        both = [[token if salad.random() < hit else 1 for token in coming[:CHAIN]] for hit in hits]
        contest.learn(["a"], [np.array(text, np.int32)])
        ours = contest.choose("a", len(text), chain(both[0], prob), both[1])
        chosen.append(ours)
        verified = both[0] if ours else both[1]
        text = text + coming[: len([known for known in outcomes(verified, coming) if known]) + 1]
    return chosen


@pytest.mark.parametrize(
    ("hits", "prob", "ours"),
    [((0.9, 0.5), 0.9, True), ((0.3, 0.8), 0.9, False), ((0.8, 0.3), 0.2, True), ((0.2, 0.9), 0.2, False)],
)
def test_the_better_drafter_wins_whatever_ours_claims(
    hits: tuple[float, float], prob: float, ours: bool
) -> None:
    chosen = play(Contest(CHAIN), 400, hits, prob)
    assert np.mean(np.array(chosen[100:]) == ours) > 0.95


def test_a_drafter_that_gets_better_is_taken_again() -> None:
    contest = Contest(CHAIN)
    assert not any(play(contest, 300, (0.2, 0.8), 0.8)[100:])
    assert np.mean(play(contest, 3_000, (0.8, 0.2), 0.8)[2_000:]) > 0.95


def test_probabilities_of_ours_decide_text_by_text() -> None:
    contest = Contest(CHAIN)
    play(contest, 400, (0.6, 0.6), 0.6)
    assert contest.choose("b", 1, chain([5] * CHAIN, 0.95), [6] * CHAIN)
    assert not contest.choose("b", 1, chain([5] * CHAIN, 0.2), [6] * CHAIN)
    assert contest.choose("b", 1, chain([5], 0.2), [])
    assert contest.choose("b", 1, chain([], 0.2), [])
    assert not contest.choose("b", 1, chain([], 0.2), [6])


def test_chances_are_known_by_length_and_place() -> None:
    chances = LengthChances(3)
    for _ in range(2_000):
        chances.learn(1, [True])
        chances.learn(3, [True, False])
    assert chances.of(1)[0] > 0.95
    assert chances.of(3)[0] > 0.95
    assert chances.of(3)[1] < 0.05
    assert chances.of(2)[1] < 0.05  # no chain of two was seen: as in all others
    assert len(chances.of(0)) == 0


def test_trust_counts_tokens_after_those_before_them() -> None:
    trust = Trust()
    probs = np.array([0.8, 0.64, 0.512])
    for right in ([True, False], [False], [True, True, False], [False]) * 200:
        trust.learn(probs, right)
    # 3 right of 7 that were judged, at 0.8 each
    assert trust.of(probs) == pytest.approx([3 / 7] * 3, abs=0.02)


def test_what_came_true_is_counted_for_texts_that_are_there() -> None:
    contest = Contest(CHAIN)
    contest.choose("a", 1, chain([1, 2], 0.5), [1, 2, 3])
    contest.choose("b", 1, chain([1, 2], 0.5), [1, 2, 3])
    assert contest.learn(["a", "c"], [np.array([0, 1, 2, 9], np.int32), np.array([0, 1], np.int32)]) == 2
    assert contest.learn(["a"], [np.array([0, 1, 2, 9, 1], np.int32)]) == 0
