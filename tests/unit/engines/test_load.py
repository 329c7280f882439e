"""Budgets by load, in a made-up engine with a clock of its own: what pays is verified, what does not costs little."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from draftstore.engines.load import AGE, KEPT, Cost, Load, PassCosts

CHAIN, STEPS = 8, 600
Seconds = Callable[[int, int], float]


def roomy(texts: int, rows: int) -> float:
    """Return the seconds of a pass on a GPU: rows cost little up to 96."""
    return 0.007 + 2e-5 * texts + 1e-4 * max(0, rows - 96)


def tight(_texts: int, rows: int) -> float:
    """Return the seconds of a pass on a CPU: every row costs as much as the first."""
    return 0.004 * rows


class Result(NamedTuple):
    """Time by that without drafts, nodes per text and step, and the estimated gain."""

    speed: float
    nodes: float
    undrafted: float
    estimate: float


class Engine:
    """Passes over texts whose drafted nodes are accepted with one probability each, given the one before."""

    def __init__(self, cost: Seconds, drafting: float = 3e-5, *, fixed_rows: bool = False) -> None:
        self.now, self.cost, self.drafting, self.rng = 0.0, cost, drafting, np.random.default_rng(0)
        self.load = Load(fixed_rows=fixed_rows, clock=lambda: self.now)
        self.fixed_rows = fixed_rows

    def run(
        self, texts: int, probability: float, steps: int = STEPS, disturbed: float = 0.0, claimed: float = 0.0
    ) -> Result:
        batch, began, tokens, nodes, undrafted, new = frozenset(range(texts)), self.now, 0, 0, 0, texts
        before = list(self.load.estimate)
        for step in range(steps):
            alone = step > 0 and self.rng.random() >= disturbed
            self.load.measure(batch, new, self.now, undisturbed=alone)
            sizes, spent = np.zeros(texts, np.int32), 0.0
            if self.load.next_step(texts):
                spent = self.drafting * texts
                self.now += spent
                chances = np.tile((claimed or probability) ** np.arange(1, CHAIN + 1), (texts, 1))
                sizes = self.load.choose(chances, spent)
            undrafted += spent == 0
            self.load.begin(batch, int(sizes.sum()), spent)
            rows = texts * (CHAIN + 1) if self.fixed_rows else texts + int(sizes.sum())
            hiccup = 3.0 if self.rng.random() < 0.02 else 1.0
            self.now += self.cost(texts, rows) * (1 + abs(self.rng.normal(0, 0.03))) * hiccup
            correct = self.rng.random((texts, CHAIN)) < probability
            accepted = np.minimum(np.cumprod(correct, axis=1).sum(axis=1), sizes).sum()
            new = texts + int(accepted)
            tokens, nodes = tokens + new, nodes + int(sizes.sum())
        rows = texts * (CHAIN + 1) if self.fixed_rows else texts
        plain = self.cost(texts, rows) * tokens / texts * 1.065  # noise and hiccups
        part = [after - old for after, old in zip(self.load.estimate, before, strict=True)]
        return Result(
            plain / (self.now - began), nodes / texts / steps, undrafted / steps, part[0] / max(part[1], 1e-9)
        )


def test_nodes_are_verified_where_passes_have_room() -> None:
    found = Engine(roomy).run(1, 0.6)
    assert found.nodes > 5
    assert found.speed > 2
    assert found.estimate == pytest.approx(found.speed, rel=0.05)


def test_a_busy_engine_verifies_the_few_nodes_that_pay() -> None:
    found = Engine(roomy).run(16, 0.5)
    assert 1.5 < found.nodes < 5
    assert found.speed > 1.4
    assert found.estimate == pytest.approx(found.speed, rel=0.05)


@pytest.mark.parametrize("texts", [1, 4, 16, 64])
@pytest.mark.parametrize("cost", [roomy, tight])
def test_hopeless_drafts_cost_little(cost: Seconds, texts: int) -> None:
    assert Engine(cost).run(texts, 0.02).speed > 0.97


@pytest.mark.parametrize("texts", [4, 16])
def test_good_drafts_cost_little_where_every_row_costs_as_much(texts: int) -> None:
    found = Engine(tight).run(texts, 0.6)
    assert found.nodes < 0.2
    assert found.speed > 0.97


def test_nodes_that_are_overestimated_cost_little() -> None:
    engine = Engine(lambda texts, rows: 0.01 + 3e-4 * (rows - texts))
    engine.run(16, 0.2, claimed=0.6)  # the first node of each text seems to pay
    assert engine.run(16, 0.2, claimed=0.6).speed > 0.97
    engine.run(16, 0.6)
    assert engine.run(16, 0.6).nodes > 0.5


def test_slow_drafts_that_do_not_pay_are_tested_for_a_hundredth_of_the_time() -> None:
    found = Engine(tight, drafting=1e-3).run(16, 0.02)  # a quarter of a pass
    assert found.undrafted > 0.9
    assert found.speed > 0.97


def test_drafts_follow_the_load() -> None:
    engine = Engine(lambda texts, rows: roomy(texts, rows) if texts < 8 else tight(texts, rows))
    assert engine.run(1, 0.6).nodes > 4
    assert engine.run(16, 0.6).nodes < 0.5
    assert engine.run(1, 0.6, steps=60).nodes > 4


def test_drafts_return_when_a_text_becomes_predictable() -> None:
    engine = Engine(roomy)
    assert engine.run(16, 0.02).nodes < 0.5
    assert engine.run(16, 0.7, steps=100).nodes > 2


@pytest.mark.parametrize("texts", [1, 4, 8])
def test_equally_certain_nodes_are_verified(texts: int) -> None:
    assert Engine(roomy).run(texts, 1.0).speed > 5


@pytest.mark.parametrize("cost", [roomy, tight])
@pytest.mark.parametrize("disturbed", [0.5, 0.98, 1.0])
def test_hopeless_drafts_cost_little_where_few_passes_can_be_measured(
    cost: Seconds, disturbed: float
) -> None:
    assert Engine(cost).run(16, 0.02, 1500, disturbed).speed > 0.95


def test_drafts_return_after_a_slow_while() -> None:
    engine = Engine(roomy)
    engine.run(4, 0.5)
    engine.cost = lambda texts, rows: 2 * roomy(texts, rows)
    assert engine.run(4, 0.5, 200).speed > 1.2
    engine.cost = roomy
    assert engine.run(4, 0.5, 400).speed > 1.4


def test_costs_that_grow_with_the_context_do_not_end_drafts() -> None:
    engine = Engine(roomy)
    engine.cost = lambda texts, rows: roomy(texts, rows) * (1 + engine.load.costs.step / 300)
    assert engine.run(4, 0.4).speed > 1.4


def test_passes_that_are_slow_at_first_do_not_end_drafts() -> None:
    seen: dict[int, int] = {}

    def cost(texts: int, rows: int) -> float:
        seen[rows] = seen.get(rows, 0) + 1
        return roomy(texts, rows) * (5 if seen[rows] <= 2 else 1)

    engine = Engine(cost)
    engine.run(4, 0.6)
    assert engine.run(4, 0.6, 1000).speed > 1.4


def test_where_rows_are_fixed_only_the_time_to_draft_counts() -> None:
    assert Engine(roomy, fixed_rows=True).run(4, 0.3).nodes == pytest.approx(CHAIN, rel=0.05)
    slow = Engine(roomy, drafting=0.01, fixed_rows=True).run(4, 0.02)
    assert slow.undrafted > 0.9


def test_only_undisturbed_passes_of_known_texts_are_measured() -> None:
    now = 0.0
    load = Load(clock=lambda: now)
    for before, after, undisturbed in (
        ({0}, {0, 1}, True), ({0, 1}, {0}, False), ({0}, set(), True), (set(), {0}, True), ({0}, {1}, True)
    ):  # fmt: skip
        load.begin(frozenset(before), 0, 0.0)
        now += 1
        load.measure(frozenset(after), 1, now, undisturbed=undisturbed)
    assert load.costs.table() == []
    for seconds in (0.75, 0.25):  # the first of another size is slower
        load.begin(frozenset({0, 1}), 0, 0.0)
        load.measure(frozenset({0}), 1, now + seconds, undisturbed=True)
    assert load.costs.table() == [(2, 2, 0.25)]


def test_a_cost_is_the_lower_quartile_of_the_last_measurements_until_they_age_or_one_is_faster() -> None:
    cost = Cost()
    for value in (1.0, 1.2, 5.0, 1.1, 1.3):
        cost.add(4, value, step=0)
    assert (cost.value, cost.at) == (1.1, 4)
    assert cost.is_known(AGE * 5 // KEPT - 1)
    assert not cost.is_known(AGE * 5 // KEPT)
    cost.add(4, 0.5, step=0)
    assert (cost.value, len(cost)) == (0.5, 2)


def test_unknown_passes_are_tried_step_by_step_and_not_for_ever() -> None:
    costs = PassCosts()
    assert costs.seconds(4) == 0
    for _ in range(2):
        costs.add(4, 0, 0.01)
    assert costs.seconds(4) == 0.01
    curve = costs.curve(4)
    assert curve.limit == 2
    assert np.interp(2, curve.rows, curve.costs) == 1
    for _ in range(2):
        costs.add(4, 4, 0.02)
    curve = costs.curve(4)
    assert curve.limit == 4
    assert np.interp([1.5, 2, 3, 4], curve.rows, curve.costs).tolist() == pytest.approx([1.5, 2, 2.5, 3])
    assert costs.curve(3).limit == 4  # borrowed
    for _ in range(8):
        costs.note_trial(4, 8)  # never measured
    assert costs.curve(4).limit < 3
