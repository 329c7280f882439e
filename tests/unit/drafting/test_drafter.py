from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import FEW_IDS, SEPARATOR, Drafter, Session, separated
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots, start
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.batch import DraftBatch
from tests.reference import make_index

VOCAB = 9
RNG = np.random.default_rng(4)
DOCUMENTS = [((RNG.zipf(1.5, 60) - 1) % VOCAB).tolist() for _ in range(10)]
INDEX = make_index([DOCUMENTS[:6], DOCUMENTS[6:]], VOCAB)

ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)


class Recorder(ContextDrafter):
    """A drafter that notes what it is asked and proposes the last token, if there is one, again."""

    def __init__(self, context_size: int = 4, vocab_size: int = VOCAB, hidden_size: int = 0) -> None:
        self.context_size = context_size
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.hidden: NDArray[np.float16] | None = None
        self.calls: list[tuple[list[list[int]], int, float]] = []

    def draft_batch(
        self,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        hidden: NDArray[np.float16] | None = None,
    ) -> DraftBatch:
        self.hidden = None if hidden is None else hidden.copy()
        assert contexts.dtype == np.int32
        assert contexts.shape[1] == self.context_size
        self.calls.append((contexts.tolist(), budget, min_prob))
        last = [row[row >= 0] for row in contexts[:, -1:]]
        root, level = np.full(1, -1, np.int16), np.zeros(1, np.uint8)
        return DraftBatch.of([(row, root[: len(row)], level[: len(row)], 1, 1) for row in last])


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
    session = recorder.session(prompt)
    text = list(prompt)
    for step in [[], *steps]:
        session.observe(step)
        text += step
        session.propose(budget=7, min_prob=0.25)
        assert recorder.calls[-1] == ([padded(text, size)], 7, 0.25)


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.uint32, np.uint64])
def test_ids_may_be_of_any_integer_type(dtype: type[np.integer]) -> None:
    recorder = Recorder()
    session = recorder.session(np.array([[1, 2, 3]], dtype))
    session.observe(np.array([1, 2], dtype))
    session.propose()
    assert recorder.calls[0][0] == [[2, 3, 1, 2]]


WRONG: list[tuple[Any, str]] = [
    ([1, VOCAB], f"token id {VOCAB} is outside .*vocabulary of {VOCAB} ids"),
    ([3, -1, 2], "token id -1 is outside"),
    ([2] * FEW_IDS + [VOCAB], f"token id {VOCAB} is outside"),
    ([2] * FEW_IDS + [-1], "token id -1 is outside"),
    ([2**40], f"token id {2**40} is outside"),
    (np.array([2**64 - 1], np.uint64), f"token id {2**64 - 1} is outside"),
    ([1.0, 2.0], "found an array of float64"),
    ([True, False], "found an array of bool"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_ids_outside_the_vocabulary_are_refused_and_leave_the_session_as_it_was(
    wrong: Any, message: str
) -> None:
    for drafter in (store(), RequestDrafter(VOCAB)):
        session: Session = drafter.session([1, 2, 1])
        tree = session.propose()
        with pytest.raises(TokenRangeError, match=message):
            session.observe(wrong)
        assert session.propose() == tree
        with pytest.raises(TokenRangeError, match=message):
            drafter.session(wrong)


@pytest.mark.parametrize(
    "drafter",
    [store(), RequestDrafter(VOCAB), Mixture([store(), RequestDrafter(VOCAB)])],
    ids=["store", "request", "mixture"],
)
def test_only_possible_budgets_are_drafted(drafter: Drafter) -> None:
    session = drafter.session([1, 2, 1])
    assert len(session.propose(0)) == len(session.propose(5, 1.1)) == 0
    for budget in (-1, 4097):
        with pytest.raises(DraftstoreError, match=f"a budget of {budget} nodes: expected 0 to 4096"):
            session.propose(budget)


def test_no_match_spans_what_is_no_token() -> None:
    text = [1, 2, 3, 4, VOCAB + 7, 1, 2, -5, 2, 3, VOCAB, 4, 2]
    parts = separated(text, VOCAB)
    assert parts.tolist() == [1, 2, 3, 4, SEPARATOR, 1, 2, SEPARATOR, 2, 3, SEPARATOR, 4, 2]
    assert separated(parts, VOCAB).tolist() == parts.tolist()
    request = RequestDrafter(VOCAB).session(parts[:7])
    request.observe(parts[7:])
    assert request.propose(9, 0.1).tokens[0] == 3
    request.observe([3])
    assert 4 in request.propose(9).tokens
    assert SEPARATOR not in request.propose(9).tokens
    for drafter in (store(), RequestDrafter(VOCAB)):
        assert drafter.session([5, 6, SEPARATOR, 1, 2]).propose() == drafter.session([1, 2]).propose()


def test_a_dense_drafter_gets_the_last_states_as_float16() -> None:
    recorder, slots = Recorder(hidden_size=3), Slots()
    first = start(recorder, [1], slots=slots, hidden=np.array([1 + 2**-12, 7e4, -1e300]))
    first.propose()
    np.testing.assert_array_equal(recorder.hidden, np.array([[1, np.inf, -np.inf]], np.float16), strict=True)
    second = start(recorder, [2], slots=slots)
    second.observe([3], hidden=np.array([1, 2, 3], np.float32))
    first.observe([4])
    slots.propose([first.slot, second.slot], [64, 64], [0.0, 0.0])
    np.testing.assert_array_equal(
        recorder.hidden, np.array([[np.nan] * 3, [1, 2, 3]], np.float16), strict=True
    )
