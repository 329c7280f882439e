"""Several drafters as one: merged trees against a slow oracle, what is learned and what is passed on."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.drafting.merging import MEMORY, TRUST
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import Slots, SlotSession, start
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests import reference
from tests.fakes.scripted import Broken, Scripted
from tests.reference import Nodes, UnclearError, nodes_of, tree_from
from tests.unit.trees.test_tree import TOKENS, some_nodes

VOCAB = 9
ONE = tree_from([(1, -1, 64)])


def mixed(*scripts: Sequence[Nodes]) -> SlotSession:
    """Start a mixture of scripted drafters; there are two at least."""
    return Mixture([Scripted(*map(tree_from, script)) for script in scripts]).session([0])


def seen(session: SlotSession) -> NDArray[np.float64]:
    """Return expected and correct tokens of each source."""
    counts: NDArray[np.float64] = session.slots.seen[session.slot]
    return counts


FORESTS = st.lists(some_nodes() | st.just([]), min_size=2, max_size=4)
IDS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4)


# -- merging -------------------------------------------------------------------------------------------------


@given(FORESTS, st.integers(1, 30), st.sampled_from([255, 60, 20]), st.data())
def test_a_node_fails_only_if_all_trees_are_wrong(
    forest: list[Nodes], budget: int, max_level: int, data: st.DataObject
) -> None:
    session = mixed(*([nodes] for nodes in forest))
    counts = st.tuples(st.floats(0, 9), st.floats(0, 9))
    seen(session)[:] = data.draw(st.lists(counts, min_size=len(forest), max_size=len(forest)))
    trusts = [min(1.0, (came + TRUST) / (expected + TRUST)) for expected, came in seen(session).tolist()]
    try:
        expected = reference.mixed_tree([nodes[:budget] for nodes in forest], trusts, budget, max_level)
    except UnclearError:
        reject()
    tree = session.propose(budget, float(LEVEL_PROBS[max_level]))
    tree.validate()
    assert nodes_of(tree) == expected


def test_empty_budget_asks_no_source() -> None:
    drafters = Scripted(ONE), Scripted(ONE)
    session = Mixture(drafters).session([0])
    assert len(session.propose(0)) == len(session.propose(5, 1.1)) == 0
    assert drafters[0].requests == drafters[1].requests == []
    assert len(session.propose(17, 0.1)) == 1, "two of 6 % make 12 %"
    assert drafters[0].requests == drafters[1].requests == [(17, 0.0)], "each gets the whole budget"
    assert len(mixed([[]], [[]]).propose()) == 0


GOOD: Nodes = [(7, -1, 3), (8, 0, 4)]


@pytest.mark.parametrize(
    "proposed",
    [
        *(tree_from([(7, -1, 3), node]) for node in [(1, 5, 9), (1, 1, 9), (1, -2, 9), (-1, -1, 9)]),
        None,
        DraftTree(np.zeros(3, np.int32), np.zeros(0, np.int16), np.zeros(0, np.uint8)),
        DraftTree(cast(Any, np.zeros(1)), np.full(1, -1, np.int16), np.zeros(1, np.uint8)),
    ],
)
def test_invalid_proposal_disables_its_source(proposed: Any, caplog: pytest.LogCaptureFixture) -> None:
    mixture = Mixture([Scripted(tree_from(GOOD)), Scripted(proposed)])
    for texts in (1, 2):  # the next text asks it again
        session = mixture.session([0])
        for _ in range(2):
            assert nodes_of(session.propose()) == GOOD
            session.observe([7, 8, 9], tree=tree_from(GOOD))
        assert mixture.faults.counts == [0, texts]
    assert "drafter 2 of a mixture has been disabled for 1 texts" in caplog.text


def test_other_broken_promises_do_no_harm() -> None:
    """Twins, children above their parents, more than the budget, and what is deeper than trees may be."""
    wild: Nodes = [(1, -1, 90), (1, -1, 3), (2, 0, 5), *((3, i, 9) for i in range(2, 90))]
    tree = mixed([wild], [[(1, -1, 90)]]).propose(70)
    tree.validate()
    assert 60 < len(tree) <= 70


# -- what is learned -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(FORESTS.filter(lambda forest: len(forest) == 2), IDS), min_size=1, max_size=4))
def test_drafters_are_judged_by_the_text_that_came(steps: list[tuple[list[Nodes], list[int]]]) -> None:
    session = mixed([forest[0] for forest, _ in steps], [forest[1] for forest, _ in steps])
    expected = np.zeros((2, 2))
    for forest, ids in steps:
        session.propose()
        session.observe(ids)
        for drafter, tree in enumerate(forest):
            for counts in reference.predicted(tree, ids):
                expected[drafter] = MEMORY * expected[drafter] + counts
    assert seen(session) == pytest.approx(expected, rel=1e-6)


def test_a_draft_is_judged_once_and_only_the_last_one() -> None:
    session = mixed([[(1, -1, 16)], [(2, -1, 16)]], [[]])
    session.observe([1])
    assert seen(session).tolist() == [[0, 0], [0, 0]], "nothing was proposed"
    session.propose()
    session.propose()
    session.observe([2])
    session.observe([2])
    assert seen(session).tolist() == [[0.5, 1], [0, 0]]
    session.propose()
    session.observe([])
    session.propose(0)
    session.observe([2])
    assert seen(session).tolist() == [[0.5, 1], [0, 0]]


# -- what it passes on ---------------------------------------------------------------------------------------


def test_everything_is_passed_on_as_it_came() -> None:
    drafters = Scripted(ONE), Scripted(ONE, candidates=True), Scripted(DraftTree.empty(), hidden=True)
    prompt, hidden = np.array([1, 2], np.int32), np.zeros(4, np.float32)
    candidates = np.arange(24, dtype=np.int32).reshape(3, 8)
    session = Mixture(drafters).session(prompt, hidden=hidden, candidates=candidates[:1])
    assert session.needs_candidates
    assert session.needs_hidden
    tree = session.propose()
    accepted = np.array([2, 7], np.int64)
    session.observe(accepted, tree=tree, candidates=candidates, hidden=hidden)
    for drafter in drafters:
        [(given_prompt, given_hidden, given_candidates)] = drafter.prefill
        assert np.array_equal(given_prompt, prompt)
        assert np.array_equal(given_hidden, hidden)
        assert np.array_equal(given_candidates, candidates[:1])
        (feedback,) = drafter.feedback
        assert feedback.tree is tree
        assert np.array_equal(feedback.accepted, accepted)
        for found, sent in [(feedback.candidates, candidates), (feedback.hidden, hidden)]:
            assert found is not None
            assert np.array_equal(found, sent)
    assert not mixed([[]], [[]]).needs_candidates
    assert not mixed([[]], [[]]).needs_hidden


def test_a_mixture_of_one_is_that_one() -> None:
    drafter = Scripted(ONE)
    mixture = Mixture([drafter])
    assert mixture.session([0]).propose(17, 0.1) == ONE
    assert drafter.requests == [(17, 0.1)], "there is nothing to merge"
    with pytest.raises(OSError, match="gone"):
        Mixture([Broken()]).session([0]).propose()
    assert mixture.faults.counts == [0]
    with pytest.raises(DraftstoreError, match="at least one drafter"):
        Mixture([])


@pytest.mark.parametrize("together", [False, True])
def test_raising_source_is_disabled_and_others_continue(together: bool) -> None:
    mixture = Mixture([Broken(), Scripted(tree_from(GOOD)), Broken()])
    slots = Slots()
    session = start(mixture, [0], slots=slots)
    other = start(None, [0], slots=slots)
    for _ in range(3):
        tree = (
            slots.propose([session.slot, other.slot], [9, 0], [0.0] * 2).trees()[0]
            if together
            else session.propose(9)
        )
        assert nodes_of(tree) == GOOD
        session.observe([7, 8, 9], tree=tree)
    assert mixture.faults.counts == [1, 0, 1]


def test_source_that_cannot_learn_is_disabled() -> None:
    mixture = Mixture([RequestDrafter(VOCAB), RequestDrafter(3)])
    session = mixture.session([0])
    session.observe([5])
    assert mixture.faults.counts == [0, 1]
    session.observe([5, 0])
    assert session.propose(1).tokens.tolist() == [5]
    with pytest.raises(TokenRangeError, match="token id -5"):
        session.observe([-5])
    with pytest.raises(TokenRangeError, match="token id 4"):
        mixture.session([4])
