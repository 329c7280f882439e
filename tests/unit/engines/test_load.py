"""Budgets by load, in a made-up engine with a clock of its own: what pays is verified, what does not costs little."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from draftstore.engines.load import PLAIN_EVERY, Load, PassCosts

CHAIN, STEPS = 8, 600
Cost = Callable[[int, int], float]


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

    def __init__(self, cost: Cost, drafting: float = 3e-5, *, fixed_rows: bool = False) -> None:
        self.now, self.cost, self.drafting, self.rng = 0.0, cost, drafting, np.random.default_rng(0)
        self.load = Load(fixed_rows=fixed_rows, clock=lambda: self.now)
        self.fixed_rows = fixed_rows

    def run(self, texts: int, probability: float, steps: int = STEPS) -> Result:
        batch, began, tokens, nodes, undrafted, new = frozenset(range(texts)), self.now, 0, 0, 0, texts
        before = list(self.load.estimate)
        for step in range(steps):
            self.load.measure(batch, new, self.now, undisturbed=step > 0)
            sizes, spent = np.zeros(texts, np.int32), None
            if self.load.wants_drafts(texts):
                spent = self.drafting * texts
                self.now += spent
                chances = np.tile(probability ** np.arange(1, CHAIN + 1), (texts, 1))
                sizes = self.load.choose(chances, spent)
            undrafted += spent is None
            self.load.begin(batch, int(sizes.sum()), spent)
            rows = texts * (CHAIN + 1) if self.fixed_rows else texts + int(sizes.sum())
            hiccup = 3.0 if self.rng.random() < 0.02 else 1.0
            self.now += self.cost(texts, rows) * (1 + abs(self.rng.normal(0, 0.03))) * hiccup
            accepted = np.minimum(self.rng.geometric(1 - probability, texts) - 1, sizes).sum()
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
def test_hopeless_drafts_cost_little(cost: Cost, texts: int) -> None:
    assert Engine(cost).run(texts, 0.02).speed > 0.97


@pytest.mark.parametrize("texts", [4, 16])
def test_good_drafts_cost_little_where_every_row_costs_as_much(texts: int) -> None:
    found = Engine(tight).run(texts, 0.6)
    assert found.nodes < 0.2
    assert found.speed > 0.97


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
    load.begin(frozenset({0, 1}), 0, 0.0)
    load.measure(frozenset({0}), 1, now + 0.25, undisturbed=True)
    assert load.costs.table() == [(2, 2, 0.25)]


def test_costs_are_lower_quartiles_of_the_last_passes_and_end_with_age() -> None:
    costs = PassCosts()
    for seconds in (0.01, 0.012, 0.05, 0.011):
        costs.add(4, 0, seconds)
    assert costs.seconds(4) == 0.011
    costs.add(4, 4, 0.022)
    assert costs.relative(4, 4).tolist() == [1, 1, 1, 1, 1]  # once measured, it could be a hiccup
    costs.add(4, 4, 0.022)
    assert costs.relative(4, 4).tolist() == pytest.approx([1, 1.25, 1.5, 1.75, 2])
    assert costs.relative(4, 20)[-1] == np.inf
    assert costs.is_known(4)
    costs.add(4, 8, 0.011)
    costs.add(4, 8, 0.011)  # on some processors, more rows may cost less
    assert costs.relative(4, 8)[[4, 8]].tolist() == [2, 1]
    costs.step += PLAIN_EVERY
    assert not costs.is_known(4)
    costs.step += 10_000
    assert costs.relative(4, 4).tolist() == [1, 1, 1, 1, 1]
