"""Several drafters as one: merged trees against a slow oracle, what is learned, and what is passed on."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.loop import Text, decode
from draftstore.decoding.planners import Fixed
from draftstore.decoding.replay import RecordedModel
from draftstore.drafting.drafter import Drafter, Session
from draftstore.drafting.faults import DisabledSession
from draftstore.drafting.mixture import MEMORY, TRUST, Mixture, MixtureSession
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.together import propose_many
from draftstore.errors import DraftstoreError, TokenRangeError
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.trees.tree import LEVEL_PROBS, DraftTree, level_of
from tests import reference
from tests.examples import examples
from tests.fakes.acceptance import accept_greedy
from tests.fakes.adversaries import tree_of
from tests.reference import Nodes, UnclearError, make_index, nodes_of
from tests.unit.trees.test_blend import TOKENS, trees

VOCAB = 9
RNG = np.random.default_rng(4)
DOCUMENTS = [((RNG.zipf(1.5, 60) - 1) % VOCAB).tolist() for _ in range(10)]
INDEX = make_index([DOCUMENTS], VOCAB)


class Feedback(NamedTuple):
    """The feedback of a pass to a session."""

    accepted: Any
    tree: DraftTree | None
    candidates: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None


class Scripted:
    """A drafter and its session, which proposes given trees in turn and records requests and feedback."""

    def __init__(self, *scripts: Nodes, candidates: bool = False, hidden: bool = False) -> None:
        self.needs_candidates = candidates
        self.needs_hidden = hidden
        self.trees = [tree_from(nodes) for nodes in scripts]
        self.requests: list[tuple[int, float]] = []
        self.feedback: list[Feedback] = []
        self.prefill: tuple[Any, ...] = ()

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.float32] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> "Scripted":
        self.prefill = (prompt_ids, hidden, candidates)
        return self

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self.requests.append((budget, min_prob))
        return self.trees[min(len(self.requests), len(self.trees)) - 1]

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        self.feedback.append(Feedback(accepted_ids, tree, candidates, hidden))


def tree_from(nodes: Nodes) -> DraftTree:
    tokens, parents, levels = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int16), np.array(levels, np.uint8))


def mixed(*scripts: Sequence[Nodes]) -> MixtureSession:
    """Start a mixture of scripted drafters; there are two at least."""
    session = Mixture([Scripted(*script) for script in scripts]).session([0])
    assert isinstance(session, MixtureSession)
    return session


FORESTS = st.lists(trees() | st.just([]), min_size=2, max_size=4)
IDS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4)


# -- merging -------------------------------------------------------------------------------------------------


@examples(300)
@given(FORESTS, st.integers(1, 30), st.sampled_from([255, 60, 20]), st.data())
def test_a_node_fails_only_if_all_trees_are_wrong(
    forest: list[Nodes], budget: int, max_level: int, data: st.DataObject
) -> None:
    session = mixed(*([nodes] for nodes in forest))
    counts = st.tuples(st.floats(0, 9), st.floats(0, 9))
    session.seen[:] = data.draw(st.lists(counts, min_size=len(forest), max_size=len(forest)))
    trusts = [min(1.0, (came + TRUST) / (expected + TRUST)) for expected, came in session.seen.tolist()]
    try:
        expected = reference.mixed_tree(forest, trusts, budget, max_level)
    except UnclearError:
        reject()
    tree = session.propose(budget, float(LEVEL_PROBS[max_level]))
    tree.validate()
    assert nodes_of(tree) == expected


def test_a_worked_example() -> None:
    """Both say 5; one alone says 9, the other alone what follows 5."""
    session = mixed([[(5, -1, 16), (9, -1, 32)]], [[(5, -1, 16), (7, 0, 32)]])
    assert nodes_of(session.propose()) == [
        (5, -1, level_of(1 - 0.5 * 0.5)),
        (7, 0, level_of(0.75 * 0.5)),
        (9, -1, level_of(0.25)),
    ]


def test_certainty_stays_certain_along_a_path() -> None:
    chain: Nodes = [(i % 3, i - 1, 0) for i in range(63)]
    assert nodes_of(mixed([chain], [[]]).propose()) == chain
    assert nodes_of(mixed([chain], [chain[:5]]).propose(10)) == chain[:10]


@given(trees(), st.integers(1, 12))
def test_draft_of_a_single_source_is_unchanged(nodes: Nodes, budget: int) -> None:
    assert nodes_of(mixed([nodes], [[]], [[]]).propose(budget)) == nodes[:budget]


@examples(50)
@given(trees(), trees(), st.integers(0, 255))
def test_a_bound_is_a_prefix(left: Nodes, right: Nodes, level: int) -> None:
    session = mixed([left], [right])
    whole = session.propose(4096)
    min_prob = float(LEVEL_PROBS[level])
    assert session.propose(4096, min_prob) == whole.prefix(int(np.count_nonzero(whole.probs >= min_prob)))
    for budget in range(1, len(whole) + 1):
        assert session.propose(budget) == whole.prefix(budget)


def test_empty_budget_asks_no_source() -> None:
    drafters = Scripted([(1, -1, 0)]), Scripted([(1, -1, 0)])
    session = Mixture(drafters).session([0])
    assert len(session.propose(0)) == len(session.propose(5, 1.1)) == 0
    assert drafters[0].requests == drafters[1].requests == []
    assert len(mixed([[]], [[]]).propose()) == 0
    for budget in (-1, 4097):
        with pytest.raises(DraftstoreError, match=f"a budget of {budget} nodes"):
            session.propose(budget)


def test_each_source_gets_the_whole_budget() -> None:
    drafters = Scripted([(1, -1, 64)]), Scripted([(1, -1, 64)])
    session = Mixture(drafters).session([0])
    assert len(session.propose(17, 0.1)) == 1, "two of 6 % make 12 %"
    assert drafters[0].requests == drafters[1].requests == [(17, 0.0)]


@pytest.mark.parametrize("node", [(1, 5, 9), (1, 1, 9), (1, -2, 9), (-1, -1, 9)])
def test_invalid_proposal_disables_its_source(
    node: tuple[int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    good: Nodes = [(7, -1, 3), (8, 0, 4)]
    mixture = Mixture([Scripted(good), Scripted([(7, -1, 3), node])])
    session, token, parent = mixture.session([0]), node[0], node[1]
    for _ in range(2):
        assert nodes_of(session.propose()) == good
        session.observe([7, 8, 9], tree=tree_from(good))
    assert "drafter 2 of a mixture is left out of 1 texts by now" in caplog.text
    assert f"it proposed node 1 with token {token} and parent {parent}" in caplog.text
    assert mixture.faults.counts == [0, 1]
    assert len(mixture.session([0]).propose()) == 2, "the next text asks it again"
    assert mixture.faults.counts == [0, 2]


@pytest.mark.parametrize(
    "proposed",
    [
        None,
        DraftTree(np.zeros(3, np.int32), np.zeros(0, np.int16), np.zeros(0, np.uint8)),
        DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int16), np.zeros(2, np.uint8)),
        DraftTree(np.zeros((1, 1), np.int32), np.full((1, 1), -1, np.int16), np.zeros((1, 1), np.uint8)),
        DraftTree(cast(Any, np.zeros(1)), np.full(1, -1, np.int16), np.zeros(1, np.uint8)),
    ],
)
def test_malformed_proposal_disables_its_source(proposed: Any) -> None:
    good: Nodes = [(7, -1, 3), (8, 0, 4)]
    mixture = Mixture([Scripted(good), Scripted(good)])
    session = cast(MixtureSession, mixture.session([0]))
    assert nodes_of(session.merge([tree_from(good), proposed], 9)) == good
    assert nodes_of(session.merge([tree_from(good), DraftTree.empty()], 9)) == good
    assert mixture.faults.counts == [0, 1]


def test_other_broken_promises_do_no_harm() -> None:
    """Twins, children above their parents, more than the budget, and what is deeper than trees may be."""
    wild: Nodes = [(1, -1, 90), (1, -1, 3), (2, 0, 5), *((3, i, 9) for i in range(2, 90))]
    tree = mixed([wild], [[(1, -1, 90)]]).propose(70)
    tree.validate()
    assert 60 < len(tree) <= 70


# -- what is learned -----------------------------------------------------------------------------------------


@examples(200)
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
    assert session.seen == pytest.approx(expected, rel=1e-6)


def test_confident_wrong_drafter_loses_its_weight() -> None:
    session = mixed([[(1, -1, 0), (2, 0, 0)]], [[(3, -1, 16), (4, 0, 16)]])
    assert session.propose(2).tokens.tolist() == [1, 2]
    for _ in range(12):
        session.propose()
        session.observe([3, 4])
    first, second = session.propose().probs[:2].tolist()
    assert session.propose(2).tokens.tolist() == [3, 4]
    assert (first, second) == (0.5, 0.5), "what came more often than expected is not raised"
    for _ in range(40):
        session.propose()
        session.observe([1, 2])
    assert session.propose(2).tokens.tolist() == [1, 2], "nor is it forgotten for ever"


def test_a_draft_is_judged_once_and_only_the_last_one() -> None:
    session = mixed([[(1, -1, 16)], [(2, -1, 16)]], [[]])
    session.observe([1])
    assert session.seen.tolist() == [[0, 0], [0, 0]], "nothing was proposed"
    session.propose()
    session.propose()
    session.observe([2])
    session.observe([2])
    assert session.seen.tolist() == [[0.5, 1], [0, 0]]
    session.propose()
    session.observe([])
    session.propose(0)
    session.observe([2])
    assert session.seen.tolist() == [[0.5, 1], [0, 0]]


# -- what it passes on ---------------------------------------------------------------------------------------


def test_everything_is_passed_on_as_it_came() -> None:
    drafters = Scripted([(1, -1, 0)]), Scripted([(2, -1, 5)], candidates=True), Scripted([], hidden=True)
    prompt, hidden = np.array([1, 2], np.int32), np.zeros(4, np.float32)
    candidates = np.arange(24, dtype=np.int32).reshape(3, 8)
    session = Mixture(drafters).session(prompt, hidden=hidden, candidates=candidates[:1])
    assert session.needs_candidates
    assert session.needs_hidden
    tree = session.propose()
    accepted = np.array([2, 7], np.int64)
    session.observe(accepted, tree=tree, candidates=candidates, hidden=hidden)
    for drafter in drafters:
        assert drafter.prefill[0] is prompt
        assert drafter.prefill[1] is hidden
        assert np.array_equal(drafter.prefill[2], candidates[:1])
        (feedback,) = drafter.feedback
        assert all(
            found is sent for found, sent in zip(feedback, (accepted, tree, candidates, hidden), strict=True)
        )
    assert not mixed([[]], [[]]).needs_candidates
    assert not mixed([[]], [[]]).needs_hidden


def test_a_mixture_of_one_is_that_one() -> None:
    drafter = Scripted([(1, -1, 5)])
    assert Mixture([drafter]).session([0]) is drafter
    with pytest.raises(DraftstoreError, match="at least one drafter"):
        Mixture([])


class Broken(Scripted):
    """Cannot propose."""

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        raise OSError("gone")


@pytest.mark.parametrize("together", [False, True])
def test_raising_source_is_disabled_and_others_continue(together: bool) -> None:
    good: Nodes = [(7, -1, 3), (8, 0, 4)]
    mixture = Mixture([Broken([]), Scripted(good), Broken([])])
    session = mixture.session([0])
    for _ in range(3):
        tree = (
            propose_many([session, DisabledSession()], [9, 0], [0.0] * 2)[0]
            if together
            else session.propose(9)
        )
        assert nodes_of(tree) == good
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


# -- together ------------------------------------------------------------------------------------------------


def everything() -> list[Drafter]:
    rest = [RestDrafter(INDEX, STRATEGIES[name]) for name in ("backoff", "longest")]
    return [RequestDrafter(VOCAB), *rest, RecyclingDrafter(VOCAB)]


def decoded(output: list[int], drafters: Sequence[Drafter], budget: int = 12) -> list[DraftTree]:
    """Decode a given output; return the trees that were verified."""
    model = RecordedModel(np.array(output, np.int32))
    session = Mixture(drafters).session([1, 2, output[0]])
    steps = list(decode(model, Text(session, Fixed(budget), model.ends)))
    assert [token for step in steps for token in step.tokens] == output[1:]
    return [step.tree for step in steps]


@examples(40)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40))
def test_drafters_of_all_kinds_decode_together(output: list[int]) -> None:
    found = decoded(output, everything())
    for tree in found:
        tree.validate()
        assert len(tree) <= 12
    assert found == decoded(output, everything()), "drafts depend on nothing but the text"


def test_a_mixture_may_be_part_of_another() -> None:
    inner = Mixture([RequestDrafter(VOCAB), RestDrafter(INDEX, STRATEGIES["backoff"])])
    session: Session = Mixture([inner, RecyclingDrafter(VOCAB)]).session([1, 2, 1])
    assert session.needs_candidates
    tree = session.propose(20)
    tree.validate()
    accepted = accept_greedy(tree, np.zeros(len(tree) + 1, np.int32))
    session.observe(accepted.tokens, tree=tree, candidates=np.zeros((len(tree) + 1, 8), np.int32))
    session.propose(20).validate()


def test_merging_many_wide_trees() -> None:
    rng = np.random.default_rng(5)
    forest = []
    for _ in range(5):
        paths: dict[tuple[int, ...], float] = {}
        while len(paths) < 120:
            parent = (*list(paths), ())[int(rng.integers(0, len(paths) + 1))]
            chance = paths.get(parent, 1.0) * float(rng.uniform(0.3, 1.0))
            paths.setdefault((*parent, int(rng.integers(0, 30))), chance)
        forest.append(nodes_of(tree_of(paths)))
    session = mixed(*([nodes] for nodes in forest))
    for budget in (1, 64, 4096):
        tree = session.propose(budget)
        assert nodes_of(tree) == reference.mixed_tree(forest, [1.0] * 5, budget)
    assert len(tree) > 120
