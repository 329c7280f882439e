"""Drafts from the request itself: against a slow oracle, step by step as texts grow, and at its limits."""

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.drafting.history import LENGTHS, HistoryRule
from draftstore.drafting.request import SPARE, RequestDrafter
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests import reference
from tests.reference import UnclearError, nodes_of
from tests.unit.search.test_expand import NARROW, WIDE, joined

LAST_ID = 2**31 - 2


@st.composite
def texts(draw: st.DrawFn, vocab_size: int = NARROW, most: int = 8) -> list[int]:
    """Draw a text of a few motifs, so that much occurs more than once."""
    ids = st.integers(vocab_size - draw(st.sampled_from([4, 3, 2, 1])), vocab_size - 1)
    motifs = draw(st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=4))
    return joined(draw(st.lists(st.sampled_from(motifs), max_size=most)))


RULES = st.builds(
    HistoryRule,
    max_match=st.sampled_from([32, 1, 2, 3, 5, 9]),
    depth=st.sampled_from([63, 1, 2, 5]),
    rows=st.sampled_from([32, 1, 2, 3]),
    floor=st.sampled_from([0.01, 0.0, 0.0713]),
    alpha=st.sampled_from([0.0, 0.731, 3.17]),
    beta=st.sampled_from([2.0, 0.377, 6.0]),
    doubt=st.sampled_from([0.05, 0.0, 0.313]),
)


def draft(
    text: Sequence[int], vocab_size: int = NARROW, budget: int = 64, min_prob: float = 0.0
) -> DraftTree:
    return RequestDrafter(vocab_size).session(text).propose(budget, min_prob)


# -- against the oracle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE, LAST_ID + 1])
@given(st.data(), RULES, st.sampled_from([12, 1, 2, 5, 40]), st.sampled_from([255, 100, 40]))
def test_drafts_agree_with_the_oracle(
    vocab_size: int, data: st.DataObject, rule: HistoryRule, budget: int, max_level: int
) -> None:
    text = data.draw(texts(vocab_size))
    min_prob = float(LEVEL_PROBS[max_level])
    try:
        expected = reference.request_tree(text, rule, budget, max_level)
    except UnclearError:
        reject()
    tree = RequestDrafter(vocab_size, rule).session(text).propose(budget, min_prob)
    tree.validate()
    assert nodes_of(tree) == expected


@given(st.lists(texts(most=3), min_size=1, max_size=6))
def test_a_text_that_grows_drafts_as_if_it_had_come_whole(parts: list[list[int]]) -> None:
    growing = RequestDrafter(NARROW).session([])
    for part, text in zip(parts, accumulate(parts, list.__add__), strict=True):
        growing.observe(part, tree=DraftTree.empty())
        tree = growing.propose(20)
        assert tree == growing.propose(20), "to propose changes nothing"
        assert tree == draft(text, budget=20)


def test_arrays_grow_with_the_text() -> None:
    """Past the room of a new session, several times, by many tokens or one."""
    rng = np.random.default_rng(2)
    text = rng.integers(0, 300, 4 * SPARE).astype(np.int32)
    text[-40:] = text[100:140]
    growing = RequestDrafter(NARROW + 300).session(text[:7])
    for start, stop in [(7, 9), (9, SPARE), (SPARE, SPARE + 600), (SPARE + 600, 4 * SPARE - 9)]:
        growing.observe(text[start:stop])
    for place in range(4 * SPARE - 9, 4 * SPARE):
        growing.observe(text[place : place + 1])
    tree = growing.propose(30)
    assert tree == draft(text.tolist(), 305, 30)
    assert nodes_of(tree)[:3] == reference.request_tree(text.tolist(), HistoryRule(), 3)
    assert tree.accepted(text[140:160]) == list(range(20)), "what was copied goes on"


# -- examples ------------------------------------------------------------------------------------------------


def test_occurrences_are_exact_where_keys_collide() -> None:
    """Many n-grams in a table that is half full: each finds its own list."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, LAST_ID + 1, 3000).tolist()
    for place in (0, 17, 1234, 2900):
        for size in LENGTHS:
            tree = draft([*text, *text[place : place + size]], LAST_ID + 1, 5)
            assert tree.tokens.tolist() == text[place + size : place + size + 5]


# -- its contract --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"max_match": 0}, {"depth": 64}, {"rows": 4097}, {"doubt": 1.1}],
)
def test_a_rule_that_cannot_be_followed_is_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(DraftstoreError, match=f"a rule for growing texts with {name} = "):
        RequestDrafter(NARROW, HistoryRule(**change))


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31])
def test_a_vocabulary_of_nothing_or_too_much_is_refused(vocab_size: int) -> None:
    with pytest.raises(DraftstoreError, match="a vocabulary of"):
        RequestDrafter(vocab_size)


def test_a_prediction_is_drafted_from_the_first_token_on() -> None:
    prompt, prediction = [1, 2, 3, 4], [10, 11, 12, 13, 14, 15]
    drafter = RequestDrafter(20, prediction=prediction)
    session = drafter.session([*prompt, 10])  # the first token comes from the prefill
    assert session.propose(8).tokens.tolist()[:5] == [11, 12, 13, 14, 15]
    session.observe([11, 17])  # the answer departs from it,
    session.observe([13])  # and comes back
    assert session.propose(8).tokens.tolist()[:2] == [14, 15]
    with pytest.raises(TokenRangeError, match="token id 20"):
        RequestDrafter(20, prediction=[20])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda session: pickle.loads(pickle.dumps(session))])
def test_a_copy_of_a_session_has_a_text_of_its_own(copied: Callable[[Any], Any]) -> None:
    session = RequestDrafter(NARROW).session([1, 2, 3, 1, 2])
    other = copied(session)
    session.observe([0, 1] * SPARE)
    del session
    other.observe([3])
    assert nodes_of(other.propose(8)) == nodes_of(draft([1, 2, 3, 1, 2, 3], budget=8))
