"""How much of a draft is worth verifying: the choice and what it learns from the text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.budget import (
    BANDS,
    FORGETTING,
    PRIOR,
    CostPlanner,
    Fixed,
    Planner,
    capped,
    trim_together,
)
from draftstore.decoding.curve import CostCurve, Costs
from draftstore.decoding.loop import Text, decode
from draftstore.decoding.replay import RecordedModel
from draftstore.drafting.slots import start
from draftstore.errors import DraftTreeError
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import LEVEL_PROBS, DraftTree
from tests.fakes.adversaries import AlwaysWrong, Prophet, RandomTrees, tree_of
from tests.unit.trees.test_tree import trees

CPU = CostCurve((1, 2, 4, 8, 16, 32, 64, 128), (0.041, 0.062, 0.062, 0.074, 0.090, 0.115, 0.176, 0.287))
GPU = CostCurve((1, 16, 32, 64, 128), (0.007, 0.0077, 0.0084, 0.0098, 0.0126))
FLAT = CostCurve((1, 128), (0.01, 0.01))
BATCHES = dataclasses.replace(CPU, batches=(Costs(3, (1, 2, 8), (0.06, 0.065, 0.2)),))
CURVES = {"cpu": CPU, "gpu": GPU, "flat": FLAT, "batches": BATCHES}
WIDE = tree_of({(token,): 0.1 for token in range(1, 10)})


DRAFTS = trees(24, ids=st.integers(0, 3))

HISTORIES = st.lists(st.tuples(DRAFTS, st.lists(st.integers(0, 3), min_size=1, max_size=6)), max_size=4)


def band_of(tree: DraftTree, node: int) -> tuple[float, int]:
    """Return a node's probability given its parent, and the band of it."""
    parent = int(tree.parents[node])
    steps = int(tree.levels[node]) - (int(tree.levels[parent]) if parent >= 0 else 0)
    return float(LEVEL_PROBS[steps]), min(steps // 16, BANDS - 1)


def factors_after(history: Sequence[tuple[DraftTree, Sequence[int]]]) -> NDArray[np.float64]:
    """Return what a text has taught, slowly: actual by expected acceptances in each band."""
    seen = np.zeros((2, BANDS))
    for tree, came in history:
        path = tree.accepted(np.array(came, np.int32))
        for node in [-1, *path][: len(came)]:
            for child in np.flatnonzero(tree.parents == node).tolist():
                follows, band = band_of(tree, child)
                seen[:, band] += follows, child in path
        seen *= FORGETTING ** len(came)
    expected, actual = seen + PRIOR
    return np.array(actual / expected)


def expected_of(tree: DraftTree, factors: NDArray[np.float64], size: int) -> float:
    """Return the accepted tokens that the first nodes of a tree expect, slowly."""
    chances: list[float] = []
    for node, parent in enumerate(tree.parents[:size].tolist()):
        follows, band = band_of(tree, node)
        chances.append(min(1.0, follows * factors[band]) * (chances[parent] if parent >= 0 else 1.0))
    return sum(chances)


@given(st.lists(st.tuples(DRAFTS, HISTORIES), min_size=1, max_size=4), st.sampled_from(sorted(CURVES)))
def test_the_chosen_number_of_nodes_is_the_best_of_all(texts: list[tuple[DraftTree, Any]], name: str) -> None:
    """Of a text or several, whatever they have learned; each has as many rows as the largest draft."""
    planners, drafts = [], []
    for tree, history in texts:
        planner = CostPlanner(CURVES[name], 12)
        for proposed, came in history:
            planner.learn(proposed, DraftTree.empty(), Acceptance([], np.array(came, np.int32)))
        planners.append(planner)
        drafts.append(tree.prefix(12))
    costs = CURVES[name].costs(len(texts), 13)
    factors = [factors_after(history) for _, history in texts]

    def speed(size: int) -> float:
        expected = (expected_of(tree, each, size) for tree, each in zip(drafts, factors, strict=True))
        return (len(texts) + sum(expected)) / float(costs[size])

    chosen = trim_together(planners, DraftBatch.of_trees([tree for tree, _ in texts])).trees()
    width = max(map(len, chosen))
    assert chosen == [tree.prefix(width) for tree in drafts]
    speeds = [speed(size) for size in range(max(map(len, drafts)) + 1)]
    assert speeds[width] == pytest.approx(max(speeds))
    assert all(less < speeds[width] * (1 + 1e-9) for less in speeds[:width])


def test_later_parents_are_refused() -> None:
    for parents in ([0], [-1, 1], [-2], [-1, 0, -7]):
        zeros = np.zeros(len(parents))
        tree = DraftTree(zeros.astype(np.int32), np.array(parents, np.int16), zeros.astype(np.uint8))
        with pytest.raises(DraftTreeError, match=r"has parent .*, expected -1 or an earlier node"):
            CostPlanner(FLAT).trim(tree)


def test_planners_of_other_kinds_choose_alone() -> None:
    mixed: list[Any] = [CostPlanner(FLAT, 4), Fixed(2), CostPlanner(FLAT, 6)]
    assert trim_together(mixed, DraftBatch.of_trees([WIDE] * 3)).sizes.tolist() == [4, 2, 6]
    assert len(trim_together([], DraftBatch.empty(0)).sizes) == 0


def test_a_request_may_ask_for_less_than_the_planner_verifies() -> None:
    for planner in (CostPlanner(FLAT, 6), Fixed(6)):
        assert len(capped(planner, 3).trim(WIDE)) == 3
        assert len(capped(planner, 50).trim(WIDE)) == 6
        assert capped(planner, None) is planner
        assert len(planner.trim(WIDE)) == 6


# --- whole texts ---


def times(
    curve: CostCurve, drafter: Any, output: Sequence[int], planner: Planner | None = None
) -> list[float]:
    """Return the seconds that each pass takes by the curve."""
    model = RecordedModel(np.array(output, np.int32))
    spoken = Text(start(drafter, [0, output[0]]), planner or CostPlanner(curve), model.ends)
    return [curve.cost(len(step.tree) + 1) for step in decode(model, spoken)]


def text(size: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50, size)]


@pytest.mark.parametrize("name", CURVES)
@given(size=st.integers(40, 80), seed=st.integers(0, 100), wrong=st.booleans())
def test_no_text_is_much_slower_than_plain_decoding(name: str, size: int, seed: int, wrong: bool) -> None:
    """However many nodes of it are wrong."""
    curve, output = CURVES[name], text(size, seed)
    drafter = AlwaysWrong(50, [[0, *output]], seed) if wrong else RandomTrees(50, seed)
    assert sum(times(curve, drafter, output)) <= curve.cost(1) * (size - 1) / 0.95


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
def test_overconfident_drafts_are_not_verified_until_they_become_good(name: str) -> None:
    curve, output = CURVES[name], text(600)
    spent = times(curve, Boaster(output, 200), output)
    plain = curve.cost(1)
    assert sum(spent[:199]) <= 1.01 * plain * 199
    assert sum(spent[199:]) < 0.6 * plain * 400


def test_the_least_likely_tokens_are_judged_too() -> None:
    planner, tree = CostPlanner(GPU), tree_of({(5,): 0.02})
    assert len(planner.trim(tree)) == 1
    for _ in range(600):
        planner.learn(tree, tree, Acceptance([], np.array([7], np.int32)))
    assert len(planner.trim(tree)) == 0


def test_the_same_text_and_drafts_give_the_same_plan() -> None:
    output = text(150)
    planner = CostPlanner(CPU)
    drafter = Prophet(50, [[0, *output]], error_rate=0.5)
    first = times(CPU, drafter, output, planner)
    assert times(CPU, drafter, output, planner) == first, "a new text starts afresh"
    assert times(CPU, drafter, output) == first
