from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.drafting.drafter import ContextDrafter, ContextSession, Drafter, Session, propose_batch
from draftstore.errors import TokenRangeError
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree
from tests.reference import make_index

VOCAB = 9
RNG = np.random.default_rng(4)
DOCUMENTS = [((RNG.zipf(1.5, 60) - 1) % VOCAB).tolist() for _ in range(10)]
INDEX = make_index([DOCUMENTS[:6], DOCUMENTS[6:]], VOCAB)

ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)


class Recorder:
    """A drafter that notes what it is asked and proposes the last token again."""

    def __init__(self, context_size: int = 4, vocab_size: int = VOCAB, hidden_size: int = 0) -> None:
        self.context_size = context_size
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.hidden: NDArray[np.float16] | None = None
        self.calls: list[tuple[list[list[int]], int, float]] = []

    def draft(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> list[Draft]:
        self.hidden = None if hidden is None else hidden.copy()
        assert contexts.dtype == np.int32
        assert contexts.shape[1] == self.context_size
        self.calls.append((contexts.tolist(), budget, min_prob))
        last = contexts[:, -1:]
        return [Draft(DraftTree(row, np.array([-1], np.int16), np.zeros(1, np.uint8)), 1, 1) for row in last]


def store(strategy: str = "backoff") -> RestDrafter:
    return RestDrafter(INDEX, STRATEGIES[strategy])


def padded(text: list[int], size: int) -> list[int]:
    return ([-1] * size + text)[-size:]


@pytest.mark.parametrize("size", [1, 4, 16])
@given(prompt=ids, steps=st.lists(ids, max_size=5))
def test_a_session_keeps_the_last_tokens_of_its_text(
    size: int, prompt: list[int], steps: list[list[int]]
) -> None:
    recorder = Recorder(size)
    session = ContextSession(recorder, prompt)
    text = list(prompt)
    for step in [[], *steps]:
        session.observe(step)
        text += step
        session.propose(budget=7, min_prob=0.25)
        assert recorder.calls[-1] == ([padded(text, size)], 7, 0.25)
        assert session.context.shape == (1, size)
        assert session.context.dtype == np.int32


@pytest.mark.parametrize("form", [
    list, tuple, np.int32, np.int64, np.uint16, np.uint32, np.uint64, lambda x: np.array([x]),
])  # fmt: skip
def test_ids_may_come_in_any_integer_form(form: Any) -> None:
    values: Any = [1, 2, 3]
    given_ids = (
        np.array(values, form) if isinstance(form, type) and issubclass(form, np.generic) else form(values)
    )
    session = ContextSession(Recorder(), given_ids)
    session.observe(given_ids)
    assert session.context.tolist() == [[3, 1, 2, 3]]


def test_a_session_keeps_no_hold_of_what_it_was_given() -> None:
    prompt = np.array([1, 2, 3, 4, 5], np.int32)
    session = ContextSession(Recorder(), prompt)
    prompt[:] = 8
    assert session.context.tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int32), np.empty(0), np.empty((0, 3))])
def test_nothing_accepted_changes_nothing(empty: Any) -> None:
    session = ContextSession(Recorder(), [1, 2])
    session.observe(empty)
    assert session.context.tolist() == [[-1, -1, 1, 2]]
    assert ContextSession(Recorder(), empty).context.tolist() == [[-1, -1, -1, -1]]


WRONG: list[tuple[Any, str]] = [
    ([1, VOCAB], f"token id {VOCAB} is outside the store's vocabulary of {VOCAB} ids"),
    ([3, -1, 2], "token id -1 is outside"),
    ([-7, VOCAB], "token id -7 is outside"),
    ([2**31], f"token id {2**31} is outside"),
    (np.array([2**64 - 1], np.uint64), f"token id {2**64 - 1} is outside"),
    (np.array([65_535], np.uint16), "token id 65535 is outside"),
    (VOCAB, f"token id {VOCAB} is outside"),
    ([1.0, 2.0], "found an array of float64"),
    (np.array([1], np.float32), "found an array of float32"),
    ([True, False], "found an array of bool"),
    (["a"], "found an array of <U1"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_ids_outside_the_vocabulary_are_refused_and_leave_the_session_as_it_was(
    wrong: Any, message: str
) -> None:
    session = store().session([1, 2, 3])
    before, tree = session.context.copy(), session.propose()
    with pytest.raises(TokenRangeError, match=message):
        session.observe(wrong)
    assert np.array_equal(session.context, before)
    assert session.propose() == tree
    with pytest.raises(TokenRangeError, match=message):
        store().session(wrong)


def test_a_wide_vocabulary_takes_ids_above_65_535() -> None:
    session = ContextSession(Recorder(2, 151_665), [151_664, 65_536])
    assert session.context.tolist() == [[151_664, 65_536]]
    with pytest.raises(TokenRangeError, match="vocabulary of 151,665 ids"):
        session.observe([151_665])


def test_static_store_ignores_other_feedback() -> None:
    drafter = store()
    plain = drafter.session([1, 2, 3])
    hidden, candidates = np.zeros(4, np.float32), np.zeros((1, 8), np.int32)
    informed = drafter.session([1, 2, 3], hidden=hidden, candidates=candidates)
    tree = informed.propose()
    plain.observe([4, 0])
    informed.observe([4, 0], tree=tree, hidden=hidden, candidates=np.zeros((len(tree) + 1, 8), np.int32))
    assert informed.propose() == plain.propose()


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(prompt=ids, rest=ids, cut=st.integers(0, 40))
def test_how_a_text_arrives_does_not_matter(
    strategy: str, prompt: list[int], rest: list[int], cut: int
) -> None:
    drafter = store(strategy)
    whole = drafter.session(prompt + rest)
    pieces = drafter.session(prompt[:cut])
    pieces.observe(prompt[cut:])
    for token in rest:
        pieces.observe([token])
    assert np.array_equal(whole.context, pieces.context)
    assert whole.propose() == pieces.propose()
    assert whole.propose() == drafter.session((prompt + rest)[-16:]).propose()


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    texts=st.lists(ids, max_size=6),
    budget=st.integers(0, 64),
    min_prob=st.sampled_from([0.0, 0.05, 0.5, 1.5]),
)
def test_a_batch_proposes_what_the_sessions_do(
    strategy: str, texts: list[list[int]], budget: int, min_prob: float
) -> None:
    drafter = store(strategy)
    sessions = [drafter.session(text) for text in texts]
    trees = propose_batch(drafter, sessions, budget, min_prob)
    assert trees == [session.propose(budget, min_prob) for session in sessions]
    assert propose_batch(drafter, sessions[::-1], budget, min_prob) == trees[::-1]


def test_a_batch_asks_its_drafter_once_and_an_empty_one_never() -> None:
    recorder = Recorder(2)
    sessions = [ContextSession(recorder, [1]), ContextSession(recorder, [1, 2, 3])]
    trees = propose_batch(recorder, sessions, 5, 0.5)
    assert recorder.calls == [([[-1, 1], [2, 3]], 5, 0.5)]
    assert [tree.tokens.tolist() for tree in trees] == [[1], [3]]
    assert propose_batch(recorder, []) == []
    assert len(recorder.calls) == 1


def test_a_dense_drafter_gets_the_last_states_as_float16() -> None:
    recorder = Recorder(hidden_size=3)
    first = ContextSession(recorder, [1], np.array([1 + 2**-12, 7e4, -1e300]))
    first.propose()
    np.testing.assert_array_equal(recorder.hidden, np.array([[1, np.inf, -np.inf]], np.float16), strict=True)
    second = ContextSession(recorder, [2])
    second.observe([3], hidden=np.array([1, 2, 3], np.float32))
    first.observe([4])
    propose_batch(recorder, [first, second])
    np.testing.assert_array_equal(
        recorder.hidden, np.array([[np.nan] * 3, [1, 2, 3]], np.float16), strict=True
    )


def test_sessions_of_one_drafter_do_not_disturb_each_other() -> None:
    drafter = store()
    a, b = drafter.session([1, 2, 3]), drafter.session([4, 5])
    tree = b.propose()
    a.observe([0] * 20)
    assert b.propose() == tree
    assert b.context[0, -2:].tolist() == [4, 5]


def test_a_tree_outlives_the_next_proposal() -> None:
    session = store().session(DOCUMENTS[0][:5])
    tree = session.propose()
    data = tree.to_bytes()
    assert len(tree) > 0
    for token in DOCUMENTS[1]:
        session.observe([token])
        session.propose()
    assert tree.to_bytes() == data


def test_store_drafters_and_their_sessions_fit_the_protocols() -> None:
    drafter: Drafter = store()
    static: ContextDrafter = store()
    session: Session = drafter.session([1, 2])
    assert session.propose() == static.draft(np.array([[1, 2]], np.int32))[0].tree


def test_the_context_is_as_long_as_the_rule_matches() -> None:
    drafter = RestDrafter(INDEX, STRATEGIES["backoff"]._replace(max_match=3))
    assert drafter.session([1, 2, 3, 4]).context.tolist() == [[2, 3, 4]]
