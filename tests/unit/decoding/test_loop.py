"""The decode loop, with a table as a model: its output, the order of its calls, and what drafters receive."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import Fixed, Planner
from draftstore.decoding.loop import RowByRow, Step, Text, decode, step
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.slots import Slots, start
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import (
    Adversary,
    AlwaysWrong,
    EosInside,
    OverBudget,
    Path,
    Prophet,
    RandomTrees,
    Silent,
    tree_of,
)
from tests.fakes.scripted import Scripted
from tests.reference import nodes_of, paths_of

VOCAB = 8
TABLE = np.random.default_rng(4).normal(0.0, 1.5, (VOCAB, VOCAB, VOCAB))
EOS = 5


def scores_of(text: Sequence[int]) -> NDArray[np.float64]:
    """Return what the model says of the next token, by the last two."""
    return np.asarray(TABLE[text[-2] if len(text) > 1 else 0, text[-1]])


def say_greedy(scores: NDArray[np.float64]) -> int:
    return int(np.argmax(scores))


class TableTarget:
    """A text of a model that is a table: `text`, the prompt and all that was kept, and `trees`, what was verified."""

    def __init__(
        self,
        text: Sequence[int],
        say: Callable[[NDArray[np.float64]], int] = say_greedy,
    ) -> None:
        self.text = list(text)
        self.say = say
        self.trees: list[DraftTree] = []

    def verify(self, tree: DraftTree) -> "TableVerdict":
        self.trees.append(tree)
        return TableVerdict(self, tree)

    def keep(self, accepted: Acceptance | None) -> None:
        if accepted is not None:
            assert self.trees[-1].tokens[accepted.path].tolist() == accepted.tokens[:-1].tolist()
            self.text += accepted.tokens.tolist()

    def ends_after(self, count: int, eos: int | None = None) -> Callable[[Sequence[int]], bool]:
        """Return what ends a text after so many tokens, or at EOS."""
        said = itertools.count(1)
        return lambda emitted: next(said) == count or emitted[-1] == eos


class TableVerdict:
    """What a table says of a tree; its candidates and hidden states name their row."""

    def __init__(self, target: TableTarget, tree: DraftTree) -> None:
        self.target = target
        self.paths: list[Path] = [(), *paths_of(nodes_of(tree))]

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        assert self.paths[row] == tuple(emitted)
        return self.target.say(scores_of([*self.target.text, *emitted]))

    def candidates(self) -> NDArray[np.int32]:
        return np.arange(8 * len(self.paths), dtype=np.int32).reshape(-1, 8)

    def hidden(self, row: int) -> NDArray[np.float32]:
        return np.full(3, row, np.float32)


class Together:
    """A `Model` over some texts."""

    def __init__(self, targets: Sequence[TableTarget]) -> None:
        self.targets = targets

    def room(self) -> int:
        return 64

    def verify(self, drafts: DraftBatch) -> RowByRow:
        return RowByRow(
            [target.verify(tree) for target, tree in zip(self.targets, drafts.trees(), strict=True)]
        )

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        for target, each in zip(self.targets, accepted, strict=True):
            target.keep(each)


def decoded(
    target: TableTarget,
    drafter: Drafter,
    ends: Callable[[Sequence[int]], bool] = lambda _: False,
    planner: Planner | None = None,
    min_prob: float = 0.0,
) -> Iterator[Step]:
    """Decode a text alone."""
    text = Text(start(drafter, target.text), planner or Fixed(), ends, min_prob)
    return decode(Together([target]), text)


def plain(text: Sequence[int], count: int, eos: int | None = None) -> list[int]:
    """Decode greedily, one token after the other."""
    said = list(text)
    while len(said) < len(text) + count and (len(said) == len(text) or said[-1] != eos):
        said.append(say_greedy(scores_of(said)))
    return said


class Halving:
    """A planner that verifies the first half of a tree, and notes what it is asked."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self.budgets = list(budgets)
        self.log: list[tuple[Any, ...]] = []

    def begin(self) -> None:
        self.log.append(("begin",))

    def budget(self) -> int:
        self.log.append(("budget",))
        return self.budgets.pop(0)

    def trim(self, tree: DraftTree) -> DraftTree:
        self.log.append(("trim", tree))
        return tree.prefix(len(tree) // 2)

    def learn(self, proposed: DraftTree, verified: DraftTree, accepted: Acceptance) -> None:
        self.log.append(("learn", proposed, verified, accepted))


# --- the text ---

DRAFTERS: dict[str, Callable[[list[int]], Adversary]] = {
    "silent": lambda truth: Silent(VOCAB),
    "random": lambda truth: RandomTrees(VOCAB),
    "over budget": lambda truth: OverBudget(VOCAB),
    "always wrong": lambda truth: AlwaysWrong(VOCAB, [truth]),
    "ends inside": lambda truth: EosInside(VOCAB, [truth], EOS),
    "half a prophet": lambda truth: Prophet(VOCAB, [truth], error_rate=0.5),
    "prophet": lambda truth: Prophet(VOCAB, [truth]),
}


@pytest.mark.parametrize("name", DRAFTERS)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
    count=st.integers(1, 30),
    eos=st.sampled_from([None, EOS]),
    budget=st.integers(0, 24),
)
def test_the_text_is_that_of_plain_decoding(
    name: str, prompt: list[int], count: int, eos: int | None, budget: int
) -> None:
    truth = plain(prompt, count, eos)
    target = TableTarget(prompt)
    drafter = DRAFTERS[name](plain(prompt, count + 9))
    steps = list(decoded(target, drafter, target.ends_after(count, eos), Fixed(budget)))
    assert target.text == drafter.text == truth
    assert [token for step in steps for token in step.tokens.tolist()] == truth[len(prompt) :]
    assert all(len(step.tree) <= budget for step in steps)
    assert all(len(step.path) == len(step.tokens) - 1 for step in steps)


def test_good_drafts_save_passes_and_bad_ones_cost_none() -> None:
    truth = plain([1, 2], 61)
    passes = {}
    for name, make in DRAFTERS.items():
        target = TableTarget([1, 2])
        drafter = make(truth)
        steps = list(decoded(target, drafter, target.ends_after(60)))
        passes[name] = len(steps)
        if name == "prophet":  # what it says is off the first branch
            assert drafter.moved == len(steps)
            assert drafter.off_first == sum(len(each.path) for each in steps)
    assert passes["silent"] == passes["always wrong"] == 60
    assert passes["prophet"] == 9  # 6 of the draft and the bonus, each time; of 60 tokens, 56 and 4
    assert passes["prophet"] < passes["half a prophet"] < 60


# --- the planner ---


def test_the_planner_trims_the_draft_and_learns_its_outcome() -> None:
    truth = plain([1], 30)[1:]
    first = tree_of([tuple(truth[:6])])
    session = Scripted(first, DraftTree.empty())
    planner = Halving([6, 2])
    target = TableTarget([1])
    steps = list(decoded(target, session, target.ends_after(5), planner, min_prob=0.25))
    assert session.requests == [(6, 0.25), (2, 0.25)]
    assert [len(tree) for tree in target.trees] == [3, 0]
    assert [entry[0] for entry in planner.log] == ["begin", "budget", "trim", "learn", "budget", "learn"]
    assert planner.log[2][1] == first
    _, proposed, verified, accepted = planner.log[3]
    assert proposed == planner.log[2][1]
    assert verified == target.trees[0] == steps[0].tree
    assert (accepted.path, accepted.tokens.tolist()) == ([0, 1, 2], truth[:4])
    assert session.feedback[0].tree == target.trees[0], "the drafter hears of what was verified"


@pytest.mark.parametrize("budget", [0, 4, 5, 64])
def test_a_fixed_planner_asks_for_its_budget_and_cuts_to_it(budget: int) -> None:
    planner = Fixed(budget)
    tree = tree_of([(1, 2, 3, 4, 5)])
    assert planner.budget() == budget
    assert planner.trim(tree) == tree.prefix(budget)
    assert (planner.trim(tree) is tree) == (budget >= 5)


# --- what the drafter hears ---


@pytest.mark.parametrize("wants", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafter_gets_the_feedback_it_needs(wants: tuple[bool, bool], right: int) -> None:
    """Candidates for every row, the hidden state of the row that predicted the last token."""
    truth = plain([1], 9)[1:]
    wrong = (truth[right] + 1) % VOCAB
    tree = tree_of({((truth[0] + 1) % VOCAB, 0): 0.9, (*truth[:right], wrong, 2): 0.5})
    session = Scripted(tree, candidates=wants[0], hidden=wants[1])
    target = TableTarget([1])
    done = next(decoded(target, session))
    [feedback] = session.feedback
    assert session.accepted == [done.tokens.tolist()] == [truth[: right + 1]]
    assert feedback.tree == target.trees[0] == tree
    assert (feedback.candidates is None, feedback.hidden is None) == (not wants[0], not wants[1])
    if feedback.candidates is not None:
        assert feedback.candidates.tolist() == np.arange(8 * len(tree) + 8).reshape(-1, 8).tolist()
    if feedback.hidden is not None:
        row = [(), *paths_of(nodes_of(tree))].index(tuple(truth[:right]))
        assert feedback.hidden.tolist() == [row] * 3


# --- several texts ---


@pytest.mark.parametrize("where", ["propose", "observe", "say", "ends"])
def test_texts_share_passes_and_fail_alone(where: str) -> None:
    """The second of three fails in its second pass; the others are as alone."""
    prompts = [[1], [2, 3], [6]]
    whole = [plain(prompt, 19) for prompt in prompts]
    targets = [TableTarget(prompt) for prompt in prompts]
    passed: list[Any] = []

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*given: Any, **more: Any) -> Any:
            if passed:
                raise ZeroDivisionError(where)
            return original(*given, **more)

        return fail

    ends = [target.ends_after(9) for target in targets]
    drafters = [Prophet(VOCAB, [text], depth=2) for text in whole]
    if where == "ends":
        ends[1] = failing(ends[1])
    else:
        owner = targets[1] if where == "say" else drafters[1]
        setattr(owner, where, failing(getattr(owner, where)))
    slots = Slots()
    texts = [
        Text(start(drafter, prompt, slots=slots), Fixed(), end)
        for drafter, prompt, end in zip(drafters, prompts, ends, strict=True)
    ]
    passed += step(texts, Together(targets))
    assert [len(done.tokens) for done in passed] == [3, 3, 3]
    error = step(texts, Together(targets))[1]
    assert isinstance(error, ZeroDivisionError)
    if where != "observe":  # by then the tokens are accepted
        assert targets[1].text == whole[1][:5]
    left = Together([targets[0], targets[2]])
    for done in step([texts[0], texts[2]], left):
        assert isinstance(done, Step)
    assert [text.over for text in texts] == [True, False, True]
    assert [targets[place].text for place in (0, 2)] == [whole[place][:10] for place in (0, 2)]
