"""How much of a draft is worth verifying: cost curves, the choice, what it learns, and what it may lose."""

import copy
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import ALLOWANCE, FORGETTING, SHARE, CostPlanner, capped, trim_together
from draftstore.decoding.calibration import (
    BANDS,
    LENGTH_BANDS,
    band_factors,
    best_prefix,
    count_lengths,
    count_outcomes,
    length_factors,
)
from draftstore.decoding.curve import Conditions, CostCurve
from draftstore.decoding.loop import Fixed, decode
from draftstore.decoding.replay import RecordedTarget
from draftstore.errors import CurveError, DraftTreeError
from draftstore.jit import read_only
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests.examples import examples
from tests.fakes.adversaries import AlwaysWrong, Prophet, RandomTrees, tree_of

CPU = CostCurve((1, 2, 4, 8, 16, 32, 64, 128), (0.041, 0.062, 0.062, 0.074, 0.090, 0.115, 0.176, 0.287))
GPU = CostCurve((1, 16, 32, 64, 128), (0.007, 0.0077, 0.0084, 0.0098, 0.0126))
FLAT = CostCurve((1, 128), (0.01, 0.01))
CURVES = {"cpu": CPU, "gpu": GPU, "flat": FLAT}
WHERE = Conditions("org/model", "0123", "some processor", "float32", "sdpa", "dynamic", 2)


@st.composite
def trees(draw: st.DrawFn, size: int = 24, tokens: int = 4) -> DraftTree:
    """Return a tree in canonical order."""
    paths = draw(
        st.dictionaries(
            st.lists(st.integers(0, tokens - 1), min_size=1, max_size=5).map(tuple),
            st.floats(1e-5, 1.0),
            max_size=size,
        )
    )
    return tree_of(paths)


def settled(tree: DraftTree, came: Sequence[int]) -> Acceptance:
    """Return what a pass over a tree settles where `came` is what the model says."""
    path = tree.accepted(np.array(came[:-1], np.int32))
    return Acceptance(path, np.array(came[: len(path) + 1], np.int32))


# --- the curve ---

CURVE_ROWS = st.lists(st.integers(2, 300), max_size=8, unique=True).map(lambda rows: (1, *sorted(rows)))


@given(st.data(), CURVE_ROWS, st.booleans())
def test_curves_ascend(data: st.DataObject, rows: tuple[int, ...], padded: bool) -> None:
    seconds = data.draw(st.lists(st.floats(1e-4, 1.0), min_size=len(rows), max_size=len(rows)))
    curve = CostCurve(rows, tuple(seconds), padded)
    costs = [curve.cost(count) for count in range(1, 400)]
    assert all(before <= after + 1e-12 for before, after in itertools.pairwise(costs))
    assert min(seconds) - 1e-12 <= costs[0]
    assert np.mean(curve.seconds) == pytest.approx(np.mean(seconds))
    again = CostCurve(rows, curve.seconds, padded)
    assert again.seconds == curve.seconds


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7))
def test_the_ascending_numbers_are_the_nearest(seconds: list[float]) -> None:
    """The nearest ascending numbers are greatest of least means (Barlow et al., 1972)."""
    curve = CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds))
    for i, found in enumerate(curve.seconds):
        least = [
            min(float(np.mean(seconds[start:stop])) for stop in range(i + 1, len(seconds) + 1))
            for start in range(i + 1)
        ]
        assert found == pytest.approx(max(least))


def test_costs_between_and_beyond_what_was_measured() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 4.0, 6.0))
    assert [curve.cost(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert CostCurve((1,), (2.0,)).cost(50) == 2.0


def test_padded_costs_are_those_of_the_next_number() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 4.0, 6.0), padded=True)
    assert [curve.cost(rows) for rows in (1, 2, 4, 5, 8, 10)] == [1.0, 4.0, 4.0, 6.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("rows", "seconds", "words"),
    [
        ((2, 4), (1.0, 2.0), "expected ascending numbers of rows from 1 on"),
        ((1, 4, 4), (1.0, 2.0, 3.0), "expected ascending"),
        ((1, 4), (1.0,), "with 1 times"),
        ((), (), "expected ascending"),
        ((1, 4), (1.0, 0.0), "a forward pass of 0.0 seconds"),
        ((1, 4), (1.0, float("nan")), "a forward pass of nan seconds"),
        ((1, 4), (1.0, float("inf")), "expected a positive number"),
    ],
)
def test_invalid_curves_are_refused(rows: tuple[int, ...], seconds: tuple[float, ...], words: str) -> None:
    with pytest.raises(CurveError, match=words):
        CostCurve(rows, seconds)


def test_curves_are_kept_in_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curve.json"
    curve = CostCurve((1, 8), (0.5, 1.25), True, WHERE, 512, "2025-01-01T00:00:00+00:00")
    curve.save(path)
    assert CostCurve.load(path) == curve
    CPU.save(path)
    assert CostCurve.load(path) == CPU


def change(document: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(document | changes).encode()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text, document: b"", "is not a cost curve .JSONDecodeError"),
        (lambda text, document: text[: len(text) // 2], "is not a cost curve .JSONDecodeError"),
        (lambda text, document: b"\xff\xfe", "is not a cost curve"),
        (lambda text, document: b"[1, 2]", "is not a cost curve .TypeError"),
        (
            lambda text, document: change(document, kind="store"),
            "is a store of version 1, expected a cost curve",
        ),
        (lambda text, document: change(document, format=2), "version 2, expected a cost curve of version 1"),
        (lambda text, document: change(document, rows=None), "is not a cost curve .TypeError"),
        (lambda text, document: change(document, seconds=[1, -1]), "a forward pass of -1.0 seconds"),
        (
            lambda text, document: change(document, conditions={"model": "m"}),
            "is not a cost curve .TypeError",
        ),
        (lambda text, document: b"{}", "is not a cost curve .KeyError"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, words: str) -> None:
    path = tmp_path / "curve.json"
    CostCurve((1, 8), (0.5, 1.0), False, WHERE).save(path)
    text = path.read_bytes()
    path.write_bytes(damage(text, json.loads(text)))
    with pytest.raises(CurveError, match=words) as refusal:
        CostCurve.load(path)
    assert str(path) in str(refusal.value)
    assert "measure it again with `draftstore tune`" in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"no cost curve at .*none\.json \(No such file"):
        CostCurve.load(tmp_path / "none.json")


def test_a_curve_holds_for_what_was_measured() -> None:
    curve = dataclasses.replace(CPU, conditions=WHERE)
    curve.require(WHERE)
    curve.require(dataclasses.replace(WHERE, model="the same under another name"))
    CPU.require(WHERE)
    other = dataclasses.replace(WHERE, device="another processor", dtype="bfloat16")
    words = (
        "measured with device 'some processor', found 'another processor' and dtype 'float32', found 'bfloat16': "
        "run `draftstore tune --model org/model` for this one"
    )
    with pytest.raises(CurveError, match=words):
        curve.require(other)


# --- the choice ---


def chances_of(tree: DraftTree, factors: NDArray[np.float64]) -> list[float]:
    """Return the corrected chance of each node, slowly."""
    chances: list[float] = []
    for node, parent in enumerate(tree.parents.tolist()):
        steps = int(tree.levels[node]) - (int(tree.levels[parent]) if parent >= 0 else 0)
        follows = float(LEVEL_PROBS[steps]) * float(factors[int(parent >= 0), min(steps // 8, BANDS - 1)])
        chances.append(min(1.0, follows) * (chances[parent] if parent >= 0 else 1.0))
    return chances


def choose(
    tree: DraftTree,
    factors: NDArray[np.float64],
    curve: CostCurve,
    rate: float,
    account: float,
    shares: Sequence[float] = (1.0,) * LENGTH_BANDS,
    promise: NDArray[np.float64] | None = None,
) -> int:
    costs = np.array([curve.cost(rows) for rows in range(1, len(tree) + 2)])
    promise = np.empty(LENGTH_BANDS) if promise is None else promise
    parents, levels = read_only(tree.parents), read_only(tree.levels)
    return int(best_prefix(parents, levels, factors, np.array(shares), costs, rate, account, promise))


def parts_of(chances: Sequence[float]) -> NDArray[np.float64]:
    """Return float64 [n, LENGTH_BANDS]: how much of each chance lies in each band of the sum of those up to it."""
    ends = [0.0, *(2.0**band for band in range(LENGTH_BANDS - 1)), np.inf]
    sums = np.concatenate(([0.0], np.cumsum(chances)))
    parts = [np.diff(np.clip(ends, before, after)) for before, after in itertools.pairwise(sums)]
    return np.array(parts).reshape(len(chances), LENGTH_BANDS)


@given(
    trees(),
    st.sampled_from(sorted(CURVES)),
    st.floats(0.5, 3.0),
    st.floats(0.0, 3.0),
    st.lists(st.floats(0.0, 3.0), min_size=2 * BANDS, max_size=2 * BANDS),
    st.lists(st.floats(0.0, 2.0), min_size=LENGTH_BANDS, max_size=LENGTH_BANDS),
)
def test_the_chosen_prefix_is_the_best_of_all(
    tree: DraftTree, name: str, rate: float, account: float, factors: list[float], shares: list[float]
) -> None:
    curve = CURVES[name]
    plain = curve.cost(1)
    rate, account = rate / plain, account * plain
    table = np.array(factors).reshape(2, BANDS)
    chances = chances_of(tree, table)
    parts = parts_of(chances)
    tokens = parts @ np.array(shares)
    worth = {
        size: 1 + float(tokens[:size].sum()) - rate * curve.cost(size + 1)
        for size in range(len(tree) + 1)
        if curve.cost(size + 1) - plain <= account
    }
    promise = np.full(LENGTH_BANDS, 9.0)
    chosen = choose(tree, table, curve, rate, account, shares, promise)
    assert chosen in worth
    assert worth[chosen] == pytest.approx(max(worth.values()), abs=1e-9)
    assert all(worth[size] < worth[chosen] + 1e-9 for size in worth if size < chosen)
    np.testing.assert_allclose(promise, parts[:chosen].sum(axis=0), atol=1e-12)


def test_the_choice_looks_beyond_a_dear_first_node() -> None:
    """On a CPU the second row costs half a pass more, the third none: one node of .45 is not worth it, two are."""
    factors = np.ones((2, BANDS))
    rate = 1 / CPU.cost(1)
    one, two = tree_of({(1,): 0.45}), tree_of({(1,): 0.45, (2,): 0.4})
    assert choose(one, factors, CPU, rate, 1.0) == 0
    assert choose(two, factors, CPU, rate, 1.0) == 2


def test_the_account_bounds_the_choice() -> None:
    tree = tree_of({(token,): 0.1 for token in range(1, 10)})
    factors = np.full((2, BANDS), 9.0)
    rate = 1 / FLAT.cost(1)
    assert choose(tree, factors, CPU, rate, 0.0) == 0
    assert choose(tree, factors, CPU, rate, CPU.cost(8) - CPU.cost(1)) == 7
    assert choose(tree, factors, FLAT, rate, 0.0) == 9


def test_later_parents_are_refused() -> None:
    planner = CostPlanner(FLAT)
    for parents in ([0], [-1, 1], [-1, 5], [-2], [-1, 0, -7]):
        tree = DraftTree(
            np.arange(len(parents), dtype=np.int32),
            np.array(parents, np.int16),
            np.zeros(len(parents), np.uint8),
        )
        with pytest.raises(DraftTreeError, match=r"has parent .*, expected an earlier node"):
            planner.trim(tree)


@given(trees(), st.integers(0, 30))
def test_what_is_verified_is_a_prefix_within_the_budget(tree: DraftTree, budget: int) -> None:
    planner = CostPlanner(FLAT, budget)
    assert planner.budget() == budget
    trimmed = planner.trim(tree)
    assert len(trimmed) <= budget
    assert trimmed == tree.prefix(len(trimmed))
    assert len(trimmed) == min(len(tree), budget), "where more rows cost nothing, all nodes are worth it"


# --- what is learned ---


def judged(tree: DraftTree, came: Sequence[int]) -> NDArray[np.float64]:
    """Return what `count_outcomes` counts, slowly."""
    seen = np.zeros((2, BANDS, 2))
    path: tuple[int, ...] = ()
    words = {tuple(int(tree.tokens[each]) for each in tree.path(node)): node for node in range(len(tree))}
    for token in came:
        if path and path not in words:
            break
        before = int(tree.levels[words[path]]) if path else 0
        for word, node in words.items():
            if word[:-1] == path:
                steps = int(tree.levels[node]) - before
                cell = seen[int(bool(path)), min(steps // 8, BANDS - 1)]
                cell += float(LEVEL_PROBS[steps]), word[-1] == token
        path = (*path, token)
    return seen


@given(trees(tokens=3), st.lists(st.integers(0, 3), max_size=6))
def test_outcomes_are_counted_along_the_text(tree: DraftTree, came: list[int]) -> None:
    seen = np.zeros((2, BANDS, 2))
    count_outcomes(
        read_only(tree.tokens),
        read_only(tree.parents),
        read_only(tree.levels),
        read_only(np.array(came, np.int32)),
        seen,
    )
    np.testing.assert_allclose(seen, judged(tree, came))


def test_factors_without_evidence_are_one() -> None:
    assert np.array_equal(band_factors(np.zeros((2, BANDS, 2))), np.ones((2, BANDS)))


def test_evidence_corrects_its_band_and_its_depth() -> None:
    seen = np.zeros((2, BANDS, 2))
    seen[0, 1] = 40.0, 10.0  # 40 acceptances were promised, 10 came
    factors = band_factors(seen)
    assert factors[0, 1] == pytest.approx(0.25, abs=0.1)
    assert factors[0, 2] == pytest.approx((10 + 4) / (40 + 4))
    assert np.array_equal(factors[1], np.ones(BANDS))
    seen[0, 1] = 10.0, 40.0
    assert band_factors(seen)[0, 1] > 3


def test_accepted_tokens_are_counted_where_some_were_promised() -> None:
    promised = np.zeros((LENGTH_BANDS, 2))
    promise = np.array([1.0, 1.0, 0.5, 0.0, 0.0, 0.0])
    for accepted in (0, 1, 3, 40):
        count_lengths(promise, accepted, promised)
    assert promised[:, 0].tolist() == [4, 4, 2, 0, 0, 0]
    assert promised[:, 1].tolist() == [3, 2, 3, 0, 0, 0]
    count_lengths(np.ones(LENGTH_BANDS), 40, promised)
    assert promised[:, 1].tolist() == [4, 3, 5, 4, 8, 24]


def test_long_promises_are_believed_as_far_as_they_held() -> None:
    promised = np.zeros((LENGTH_BANDS, 2))
    assert length_factors(promised).tolist() == [1.0] * LENGTH_BANDS
    promised[4] = 20.0, 2.0
    assert length_factors(promised)[4] == pytest.approx((2 + 4) / (20 + 4))
    planner = CostPlanner(GPU)
    tree = tree_of({tuple(range(size + 1)): 0.97 ** (size + 1) for size in range(20)})
    before = len(planner.trim(tree))
    for _ in range(20):
        planner.learn(tree, planner.trim(tree), settled(tree, [0, 1, 2, 49]))
    assert 3 <= len(planner.trim(tree)) < before


def test_evidence_is_forgotten_slowly() -> None:
    planner = CostPlanner(FLAT)
    tree = tree_of({(1,): 0.9})
    planner.learn(tree, tree, settled(tree, [2, 2]))
    wrong = band_factors(planner._seen)[0, 0]
    for _ in range(3000):
        planner.learn(DraftTree.empty(), DraftTree.empty(), settled(DraftTree.empty(), [5]))
    assert wrong < band_factors(planner._seen)[0, 0] < 1.0
    assert pytest.approx(0.5) == FORGETTING**300


# --- decoding ---


def times(
    curve: CostCurve, drafter: Any, output: Sequence[int], planner: CostPlanner | None = None
) -> list[float]:
    """Return the seconds that each pass takes by the curve."""
    planner = planner or CostPlanner(curve)
    target = RecordedTarget(np.array(output, np.int32))
    steps = decode(target, drafter.session([0, output[0]]), planner=planner, ends=target.ends)
    return [curve.cost(len(step.tree) + 1) for step in steps]


def text(size: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50, size)]


@pytest.mark.parametrize("name", CURVES)
@given(size=st.integers(2, 150), seed=st.integers(0, 100), wrong=st.booleans())
@examples(20)
def test_no_text_takes_longer_than_the_account_allows(name: str, size: int, seed: int, wrong: bool) -> None:
    curve, output = CURVES[name], text(size, seed)
    drafter = AlwaysWrong(50, [[0, *output]], seed) if wrong else RandomTrees(50, seed)
    plain = curve.cost(1)
    assert sum(times(curve, drafter, output)) <= plain * ((size - 1) * (1 + SHARE) + ALLOWANCE) + 1e-9


class Boaster:
    """Says of wrong tokens that they are all but certain, until it starts to know what comes."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, output: Sequence[int], honest_from: int) -> None:
        self.output, self.honest_from, self.place = list(output), honest_from, 1

    def session(self, prompt_ids: Any, **_prefill: Any) -> "Boaster":
        return self

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        right = self.place >= self.honest_from
        ahead = [token if right else token + 50 for token in self.output[self.place : self.place + 8]]
        return tree_of({tuple(ahead[: size + 1]): 0.95 ** (size + 1) for size in range(len(ahead))})

    def observe(self, accepted_ids: Any, **_rest: Any) -> None:
        self.place += len(accepted_ids)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_overconfident_drafts_are_not_verified(name: str) -> None:
    curve, output = CURVES[name], text(300)
    spent = times(curve, Boaster(output, 1000), output)
    assert sum(spent) <= 1.01 * curve.cost(1) * 299
    assert spent[100:] == [curve.cost(1)] * 199


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_plain_decoding_is_left_again_when_drafts_become_good(name: str) -> None:
    curve, output = CURVES[name], text(600)
    spent = times(curve, Boaster(output, 200), output)
    until_then = 0.0
    for passes, seconds in enumerate(spent):
        until_then += seconds
        if passes == 198:
            break
    rest = sum(spent) - until_then
    assert rest < 0.6 * curve.cost(1) * 400


@pytest.mark.parametrize("name", CURVES)
def test_a_drafter_that_knows_is_followed(name: str) -> None:
    curve, output = CURVES[name], text(200)
    spent = sum(times(curve, Prophet(50, [[0, *output]]), output))
    assert spent < {"cpu": 0.6, "gpu": 0.35, "flat": 0.3}[name] * curve.cost(1) * 199


class Chances:
    """A drafter whose probabilities are right: a chain of eight tokens and a rival for each, by the roll of dice."""

    needs_candidates = False
    needs_hidden = False

    def __init__(self, size: int) -> None:
        random = np.random.default_rng(5)
        self.output = random.integers(0, 50, size).tolist()
        self.trees = []
        for place in range(size):
            paths: dict[tuple[int, ...], float] = {}
            word: tuple[int, ...] = ()
            chance, astray = 1.0, False
            for token in self.output[place + 1 : place + 9]:
                holds = float(random.choice([0.85, 0.6, 0.3]))
                astray = astray or random.random() >= holds
                word = (*word, token + 50 if astray else token)
                chance *= holds
                paths[word] = chance
            self.trees.append(tree_of(paths))
        self.place = 0

    def session(self, prompt_ids: Any, **_prefill: Any) -> "Chances":
        self.place = 0
        return self

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        return self.trees[self.place].prefix(budget)

    def observe(self, accepted_ids: Any, **_rest: Any) -> None:
        self.place += len(accepted_ids)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_plan_is_better_than_any_fixed_budget(name: str) -> None:
    """It sees which drafts are likely; a fixed budget treats them all alike. Learning takes a few passes."""
    curve, drafter = CURVES[name], Chances(3000)

    def fixed(budget: int) -> float:
        target = RecordedTarget(np.array(drafter.output, np.int32))
        steps = decode(target, drafter.session([]), planner=Fixed(budget), ends=target.ends)
        return sum(curve.cost(len(step.tree) + 1) for step in steps)

    planned = sum(times(curve, drafter, drafter.output))
    assert planned < 1.01 * min(fixed(budget) for budget in range(9))


def test_the_same_text_and_drafts_give_the_same_plan() -> None:
    output = text(150)
    planner = CostPlanner(CPU)
    drafter = Prophet(50, [[0, *output]], error_rate=0.5)
    first = times(CPU, drafter, output, planner)
    assert times(CPU, drafter, output, planner) == first, "a new text starts afresh"
    assert times(CPU, drafter, output) == first


def test_the_rate_is_that_of_plain_decoding_or_better() -> None:
    planner = CostPlanner(CPU)
    assert planner.rate == pytest.approx(1 / CPU.cost(1))
    tree = tree_of({(1, 2, 3): 0.9})
    for _ in range(50):
        planner.learn(tree, tree, settled(tree, [1, 2, 3, 4]))
    assert planner.rate == pytest.approx(4 / CPU.cost(4), rel=0.08)
    for _ in range(500):
        planner.learn(tree, tree, settled(tree, [9]))
    assert planner.rate == pytest.approx(1 / CPU.cost(1))


# --- several texts in one pass ---


def test_a_pass_over_several_texts_costs_what_its_rows_cost() -> None:
    costs = CPU.costs(4, 3)
    assert costs.tolist() == [CPU.cost(4), CPU.cost(8), CPU.cost(12)]
    padded = CostCurve((1, 4, 8), (1.0, 2.0, 4.0), padded=True)
    assert padded.costs(1, 5).tolist() == [1.0, 2.0, 2.0, 2.0, 4.0]
    assert padded.costs(2, 5).tolist() == pytest.approx([4 / 3, 4.0, 4.0, 4.0, 8.0])


@given(
    st.lists(trees(), min_size=2, max_size=5),
    st.sampled_from(sorted(CURVES)),
    st.lists(
        st.tuples(st.floats(0.1, 9.0), st.floats(0.0, 3.0), st.floats(-1.0, 2.0)), min_size=5, max_size=5
    ),
)
def test_all_texts_choose_the_number_of_rows_that_is_best_for_all(
    drafts: list[DraftTree], name: str, states: list[tuple[float, float, float]]
) -> None:
    curve, texts = CURVES[name], len(drafts)
    planners = [CostPlanner(curve, 12) for _ in drafts]
    for planner, (rate, loss, account) in zip(planners, states, strict=False):
        planner._tokens, planner._seconds = rate, curve.cost(1) * (1 + loss)
        planner.account = account * curve.cost(1)
    chosen = trim_together(planners, drafts)
    drafts = [tree.prefix(min(12, len(tree))) for tree in drafts]
    widest = max(map(len, drafts))
    costs = curve.costs(texts, widest + 1)
    rate = sum(planner._tokens for planner in planners) / sum(planner._seconds for planner in planners)
    rate = max(rate, texts / costs[0])
    account = max(0.0, sum(planner.account for planner in planners))
    tokens = [np.concatenate(([0.0], np.cumsum(chances_of(tree, np.ones((2, BANDS)))))) for tree in drafts]
    worth = {
        size: sum(each[min(size, len(each) - 1)] for each in tokens) - rate * (costs[size] - costs[0])
        for size in range(widest + 1)
        if costs[size] - costs[0] <= account
    }
    width = max(map(len, chosen))
    assert width in worth
    assert worth[width] == pytest.approx(max(worth.values()), abs=1e-9)
    assert chosen == [tree.prefix(min(width, len(tree))) for tree in drafts]


def test_planners_of_other_kinds_choose_alone() -> None:
    tree = tree_of({(token,): 0.1 for token in range(1, 10)})
    mixed: list[Any] = [CostPlanner(FLAT, 4), Fixed(2), CostPlanner(FLAT, 6)]
    assert [len(each) for each in trim_together(mixed, [tree] * 3)] == [4, 2, 6]
    assert trim_together([], []) == []


def test_a_copy_of_a_planner_learns_for_itself() -> None:
    planner = CostPlanner(CPU)
    other = copy.copy(planner)
    other.begin()
    times(CPU, AlwaysWrong(50, [[0, *text(60)]]), text(60), other)
    assert planner.account == ALLOWANCE * CPU.cost(1)
    assert not planner._seen.any()


@given(seed=st.integers(0, 50), texts=st.integers(2, 6))
@examples(20)
def test_no_batch_takes_longer_than_its_accounts_allow(seed: int, texts: int) -> None:
    """However wrong the drafts of all texts are, which are equally long."""
    size, planners = 80, [CostPlanner(CPU, 16) for _ in range(texts)]
    outputs = [text(size, seed + number) for number in range(texts)]
    sessions = [AlwaysWrong(50, [[0, *each]], seed).session([0]) for each in outputs]
    spent = 0.0
    for place in range(size - 1):
        drafts = [
            session.propose(planner.budget()) for session, planner in zip(sessions, planners, strict=True)
        ]
        trees = trim_together(planners, drafts)
        spent += CPU.costs(texts, 17)[max(map(len, trees))]
        for number, (planner, session) in enumerate(zip(planners, sessions, strict=True)):
            accepted = Acceptance([], np.array(outputs[number][place : place + 1], np.int32))
            session.observe(accepted.tokens, tree=trees[number])
            planner.learn(drafts[number], trees[number], accepted)
    plain = CPU.costs(texts, 1)[0]
    assert spent <= plain * (size - 1) * (1 + SHARE) + texts * ALLOWANCE * CPU.cost(1) + 1e-9


def test_a_request_may_ask_for_less_than_the_planner_verifies() -> None:
    tree = tree_of({(token,): 0.1 for token in range(1, 10)})
    for planner in (CostPlanner(FLAT, 6), Fixed(6)):
        assert len(capped(planner, 3).trim(tree)) == 3
        assert len(capped(planner, 50).trim(tree)) == 6
        assert capped(planner, None) is planner
        assert len(planner.trim(tree)) == 6
