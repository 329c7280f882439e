"""The decode loop, with a model that is a table: what it emits, in which order it calls, and what drafters get."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Step, Tally, Text, decode, step
from draftstore.decoding.planners import Fixed, Planner
from draftstore.drafting.drafter import Session
from draftstore.errors import DraftTreeError
from draftstore.trees.tree import DraftTree
from tests.examples import examples
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
from tests.reference import (
    Model,
    Warp,
    chi_square_p,
    draw_token,
    joint_of_three,
    nodes_of,
    paths_of,
    table_model,
    warped,
)
from tests.unit.trees.test_tree import tree_of as tree_from

VOCAB = 8
SCORES = table_model(VOCAB, seed=4)
EOS = 5


def say_greedy(scores: NDArray[np.float64]) -> int:
    return int(np.argmax(scores))


class TableTarget:
    """A text of a model whose text and cache are lists, and which checks what it is given.

    Attributes:
        text: the prompt and all that was kept.
        cache: the tokens whose rows are in the cache.
        trees: what was verified.
        log: what was called, in order.
    """

    def __init__(
        self,
        text: Sequence[int],
        model: Model = SCORES,
        say: Callable[[NDArray[np.float64]], int] = say_greedy,
    ) -> None:
        self.text = list(text)
        self.cache = self.text[:-1]
        self.model = model
        self.say = say
        self.trees: list[DraftTree] = []
        self.log: list[str] = []

    def verify(self, tree: DraftTree) -> "TableVerdict":
        assert self.cache == self.text[:-1], "all but the last token are in the cache"
        self.log.append("verify")
        self.trees.append(tree)
        self.cache = [*self.text, *tree.tokens.tolist()]
        return TableVerdict(self, tree)

    def keep(self, accepted: Acceptance | None) -> None:
        self.log.append("keep")
        tree, size = self.trees[-1], len(self.text)
        if accepted is None:
            self.cache = self.text[:-1]
            return
        assert len(accepted.path) == len(accepted.tokens) - 1
        assert tree.tokens[accepted.path].tolist() == accepted.tokens[:-1].tolist()
        self.cache = self.cache[:size] + [self.cache[size + node] for node in accepted.path]
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
        self.target.log.append("choose")
        assert self.paths[row] == tuple(emitted)
        return self.target.say(self.target.model([*self.target.text, *emitted]))

    def candidates(self) -> NDArray[np.int32]:
        self.target.log.append("candidates")
        return np.arange(8 * len(self.paths), dtype=np.int32).reshape(-1, 8)

    def hidden(self, row: int) -> NDArray[np.float32]:
        self.target.log.append("hidden")
        return np.full(3, row, np.float32)


class Together:
    """A `Model` over some texts."""

    def __init__(self, targets: Sequence[TableTarget]) -> None:
        self.targets = targets

    def verify(self, trees: Sequence[DraftTree]) -> list[TableVerdict]:
        return [target.verify(tree) for target, tree in zip(self.targets, trees, strict=True)]

    def keep(self, accepted: Sequence[Acceptance | None]) -> None:
        for target, each in zip(self.targets, accepted, strict=True):
            target.keep(each)


def decoded(
    target: TableTarget,
    session: Session,
    ends: Callable[[Sequence[int]], bool] = lambda _: False,
    planner: Planner | None = None,
    min_prob: float = 0.0,
) -> Iterator[Step]:
    """Decode a text alone."""
    return decode(Together([target]), Text(session, planner or Fixed(), ends, min_prob))


def plain(text: Sequence[int], count: int, eos: int | None = None) -> list[int]:
    """Decode greedily, one token after the other."""
    said = list(text)
    while len(said) < len(text) + count and (len(said) == len(text) or said[-1] != eos):
        said.append(say_greedy(SCORES(said)))
    return said


class Script:
    """A session that proposes what it is told to and notes what it hears."""

    def __init__(
        self, trees: Sequence[DraftTree], needs_candidates: bool = False, needs_hidden: bool = False
    ) -> None:
        self.trees = list(trees)
        self.needs_candidates = needs_candidates
        self.needs_hidden = needs_hidden
        self.asked: list[tuple[int, float]] = []
        self.heard: list[dict[str, Any]] = []

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self.asked.append((budget, min_prob))
        return self.trees[len(self.asked) - 1]

    def observe(self, accepted_ids: ArrayLike, **rest: Any) -> None:
        self.heard.append({"ids": np.asarray(accepted_ids).tolist(), **rest})


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
@examples(40)
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
    session = drafter.session(prompt)
    steps = list(decoded(target, session, target.ends_after(count, eos), Fixed(budget)))
    assert target.text == session.text == truth
    assert [token for step in steps for token in step.tokens.tolist()] == truth[len(prompt) :]
    assert target.cache == target.text[:-1]
    assert all(len(step.tree) <= budget for step in steps)
    assert all(len(step.path) == len(step.tokens) - 1 for step in steps)


def test_a_prophet_is_believed_off_the_first_branch_and_a_liar_never() -> None:
    truth = plain([1, 2], 61)
    passes = {}
    for name, make in DRAFTERS.items():
        target = TableTarget([1, 2])
        drafter = make(truth)
        tally = Tally()
        for done in decoded(target, drafter.session([1, 2]), target.ends_after(60)):
            tally.add(done)
        assert target.text == truth[:-1]
        passes[name] = tally.passes
        if name == "prophet":
            assert drafter.moved == tally.passes
            assert drafter.off_first == tally.accepted
    assert passes["silent"] == passes["always wrong"] == 60
    assert passes["prophet"] == 9  # 6 of the draft and the bonus, each time; of 60 tokens, 56 and 4
    assert passes["prophet"] < passes["half a prophet"] < 60


def test_the_joint_of_three_sampled_tokens_is_exact() -> None:
    """Through the whole loop, with the penalty for all that has been said, and the end after three tokens."""
    model = warped(SCORES, Warp(temperature=0.8, top_p=0.95, penalty=1.4))
    prompt = [2, 6]
    draw = np.random.default_rng(8)
    counts = np.zeros((VOCAB,) * 3, np.int64)
    trees = {}
    for size in range(3):
        for said in itertools.product(range(VOCAB), repeat=size):
            trees[said] = RandomTrees(VOCAB, seed=1).session([*prompt, *said]).propose(12)

    class Drawn(Script):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return trees[tuple(target.text[2:])]

    for _ in range(20_000):
        target = TableTarget(prompt, model, lambda weights: draw_token(weights, draw))
        for _ in decoded(target, Drawn([]), target.ends_after(3)):
            pass
        counts[tuple(target.text[2:])] += 1
    assert chi_square_p(counts, joint_of_three(model, prompt)) > 1e-4


# --- where it ends ---


@pytest.mark.parametrize("last", range(1, 6))
def test_the_end_may_lie_anywhere_in_a_draft(last: int) -> None:
    """A draft of 4 right tokens: what ends the text is the bonus, and nothing behind it is looked at."""
    truth = plain([1], 5)[1:]
    target = TableTarget([1])
    steps = list(decoded(target, Script([tree_of([tuple(truth[:4])])]), target.ends_after(last)))
    assert len(steps) == 1
    assert steps[0].tokens.tolist() == truth[:last]
    assert steps[0].path == list(range(last - 1))
    assert target.log == ["verify", *["choose"] * last, "keep"]
    assert target.cache == [1, *truth[: last - 1]]


def test_each_token_is_asked_about_once_and_in_order() -> None:
    target = TableTarget([1])
    asked: list[list[int]] = []

    def ends(emitted: Sequence[int]) -> bool:
        asked.append(list(emitted))
        return sum(len(text) == 1 for text in asked) == 3

    session = Prophet(VOCAB, [plain([1], 30)], depth=2).session([1])
    steps = list(decoded(target, session, ends))
    whole = [step.tokens.tolist() for step in steps]
    assert [len(tokens) for tokens in whole] == [3, 3, 1]
    assert asked == [tokens[:size] for tokens in whole for size in range(1, len(tokens) + 1)]


def test_passes_run_on_demand() -> None:
    """A pass is made when its step is asked for, so what is not read costs nothing."""
    target = TableTarget([1])
    steps = decoded(target, Silent(VOCAB).session([1]))
    assert target.log == []
    next(steps)
    assert target.log == ["verify", "choose", "keep"]
    next(steps)
    assert len(target.trees) == 2


def test_a_broken_tree_stops_decoding() -> None:
    broken = tree_from([4, 4], [-1, -1], [0, 0])
    with pytest.raises(DraftTreeError, match="two children"):
        next(decoded(TableTarget([1]), Script([broken])))


# --- the planner ---


def test_the_planner_trims_what_was_proposed_and_learns_how_it_fared() -> None:
    truth = plain([1], 30)[1:]
    first = tree_of([tuple(truth[:6])])
    session = Script([first, DraftTree.empty()])
    planner = Halving([6, 2])
    target = TableTarget([1])
    steps = list(decoded(target, session, target.ends_after(5), planner, min_prob=0.25))
    assert session.asked == [(6, 0.25), (2, 0.25)]
    assert [len(tree) for tree in target.trees] == [3, 0]
    assert [entry[0] for entry in planner.log] == ["begin", *["budget", "trim", "learn"] * 2]
    assert planner.log[2][1] is first
    _, proposed, verified, accepted = planner.log[3]
    assert proposed is first
    assert verified is target.trees[0] is steps[0].tree
    assert (accepted.path, accepted.tokens.tolist()) == ([0, 1, 2], truth[:4])
    assert session.heard[0]["tree"] is target.trees[0], "the drafter hears of what was verified"


def test_budget_of_zero_skips_drafting_but_not_feedback() -> None:
    session = Script([])
    planner = Halving([0, 0, -1])
    target = TableTarget([1])
    list(decoded(target, session, target.ends_after(3), planner))
    assert session.asked == []
    assert [heard["ids"] for heard in session.heard] == [[token] for token in plain([1], 3)[1:]]
    assert [len(entry[1]) for entry in planner.log if entry[0] == "learn"] == [0, 0, 0]


@pytest.mark.parametrize("budget", [0, 1, 4, 5, 64])
def test_a_fixed_planner_asks_for_its_budget_and_cuts_what_is_above_it(budget: int) -> None:
    planner = Fixed(budget)
    tree = tree_of([(1, 2, 3, 4, 5)])
    assert planner.budget() == budget
    assert planner.trim(tree) == tree.prefix(budget)
    assert (planner.trim(tree) is tree) == (budget >= 5)
    planner.learn(tree, tree, Acceptance([], np.array([1], np.int32)))
    assert planner.budget() == budget
    assert Fixed().budget() == 64


# --- what the drafter hears ---


@pytest.mark.parametrize("wants", [*itertools.product([False, True], repeat=2)])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_drafter_gets_the_feedback_it_needs(wants: tuple[bool, bool], right: int) -> None:
    """Candidates for every row, the hidden state of the row that predicted the last token."""
    truth = plain([1], 9)[1:]
    wrong = (truth[right] + 1) % VOCAB
    tree = tree_of({((truth[0] + 1) % VOCAB, 0): 0.9, (*truth[:right], wrong, 2): 0.5})
    session = Script([tree], *wants)
    target = TableTarget([1])
    done = next(decoded(target, session))
    [heard] = session.heard
    assert done.tokens.tolist() == heard["ids"] == truth[: right + 1]
    assert heard["tree"] is tree
    assert set(heard) == {"ids", "tree", "candidates", "hidden"}
    if wants[0]:
        assert heard["candidates"].tolist() == np.arange(8 * len(tree) + 8).reshape(-1, 8).tolist()
    else:
        assert heard["candidates"] is None
    if wants[1]:
        row = [(), *paths_of(nodes_of(tree))].index(tuple(truth[:right]))
        assert heard["hidden"].tolist() == [row] * 3
    else:
        assert heard["hidden"] is None
    assert target.log[-1 - sum(wants) :] == ["keep", *["candidates"] * wants[0], *["hidden"] * wants[1]]


# --- figures ---


def test_steps_add_up() -> None:
    truth = plain([1], 8)[1:]
    session = Script([tree_of([tuple(truth[:2])]), DraftTree.empty(), tree_of([(truth[4], truth[5] ^ 1)])])
    target = TableTarget([1])
    steps = list(decoded(target, session, target.ends_after(6)))
    tally = Tally()
    assert tally.accepted_length == 0.0
    for done in steps:
        tally.add(done)
    assert (tally.passes, tally.tokens, tally.drafted, tally.accepted) == (3, 6, 4, 3)
    assert tally.accepted_length == 2.0
    for name in ("draft_ns", "forward_ns", "accept_ns"):
        assert getattr(tally, name) == sum(getattr(step, name) for step in steps)


def test_times_are_of_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1_000, 7)
    session = Script([DraftTree.empty()])

    def pause(times: int) -> None:
        for _ in range(times):
            next(clock)

    class Slow(TableTarget):
        def verify(self, tree: DraftTree) -> TableVerdict:
            pause(2)
            return super().verify(tree)

        def keep(self, accepted: Acceptance | None) -> None:
            pause(3)
            super().keep(accepted)

    monkeypatch.setattr("draftstore.decoding.loop.perf_counter_ns", lambda: next(clock))
    done = next(decoded(Slow([1]), session))
    assert (done.draft_ns, done.forward_ns, done.accept_ns) == (7, 3 * 7, 4 * 7)


# --- several texts ---


class Failing(Prophet):
    """A prophet that fails in its second pass, in one of its methods."""

    def __init__(self, text: Sequence[int], where: str) -> None:
        super().__init__(VOCAB, [text], depth=2)
        self.where = where

    def fail(self, where: str) -> None:
        if self.where == where and len(self.text) > 4:
            raise ZeroDivisionError(where)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        self.fail("propose")
        return super().propose(budget, min_prob)

    def observe(self, accepted_ids: ArrayLike, **feedback: Any) -> None:
        self.fail("observe")
        super().observe(accepted_ids, **feedback)


@pytest.mark.parametrize("where", ["propose", "observe", "choose", "ends"])
def test_texts_share_passes_and_fail_alone(where: str) -> None:
    """The second of three fails in its second pass; the others are as alone."""
    prompts = [[1], [2, 3], [6]]
    whole = [plain(prompt, 19) for prompt in prompts]
    targets = [TableTarget(prompt) for prompt in prompts]

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*given: Any) -> Any:
            if len(targets[1].text) > 4:
                raise ZeroDivisionError(where)
            return original(*given)

        return fail

    ends = [target.ends_after(9) for target in targets]
    if where == "ends":
        ends[1] = failing(ends[1])
    if where == "choose":
        targets[1].say = failing(say_greedy)
    drafters = [Failing(text, where if place == 1 else "") for place, text in enumerate(whole)]
    texts = [
        Text(drafter.session(prompt), Fixed(), end)
        for drafter, prompt, end in zip(drafters, prompts, ends, strict=True)
    ]
    first = step(texts, Together(targets))
    assert [len(done.tokens) for done in first if isinstance(done, Step)] == [3, 3, 3]
    error = step(texts, Together(targets))[1]
    assert isinstance(error, ZeroDivisionError)
    if where != "observe":  # by then the tokens are accepted
        assert targets[1].text == whole[1][:5]
    left = Together([targets[0], targets[2]])
    for done in step([texts[0], texts[2]], left):
        assert isinstance(done, Step)
    assert [text.over for text in texts] == [True, False, True]
    assert [targets[place].text for place in (0, 2)] == [whole[place][:10] for place in (0, 2)]


def test_texts_without_drafts_share_a_pass_with_others() -> None:
    targets = [TableTarget([1]), TableTarget([2])]
    texts = [
        Text(Prophet(VOCAB, [plain([1], 9)], depth=2).session([1]), Fixed(), lambda _: False),
        Text(Silent(VOCAB).session([2]), Fixed(0), lambda _: False),
    ]
    found = step(texts, Together(targets))
    assert [len(done.tokens) for done in found if isinstance(done, Step)] == [3, 1]
    assert [target.text for target in targets] == [plain([1], 3), plain([2], 1)]
