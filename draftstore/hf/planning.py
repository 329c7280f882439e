"""How much of a draft is verified: a planner for a loaded model, by what its forward passes cost."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftstore.decoding.budget import CostCurve, CostPlanner
from draftstore.decoding.loop import Fixed, Planner
from draftstore.errors import counted
from draftstore.stores.rest.store import BUDGET

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

FIXED_BUDGETS = {"cpu": 8}
"""Nodes of a draft that are verified whatever they cost, by device: on a CPU every node counts."""
TYPICAL = {
    "cpu": CostCurve((1, 2, 4, 8, 16, 32, 64, 128), (1.0, 1.5, 1.5, 1.8, 2.2, 2.8, 4.3, 7.0)),
    "cuda": CostCurve((1, 16, 32, 64, 128), (1.0, 1.1, 1.2, 1.4, 1.8)),
}
"""Curves where none was measured, in plain passes: of a small model on two cores, and of an 8B model on a large GPU by
its bandwidth and arithmetic. They keep drafts that do not pay from being verified."""


class Effort(NamedTuple):
    """How much is verified.

    Attributes:
        budget: most nodes of a draft; None is 64, and with `fixed` what suits the device.
        min_prob: least probability of a node.
        curve: file of a cost curve; None takes the one that `draftstore tune` has stored, or a typical one.
        fixed: verify as many nodes as the budget lets, whatever they cost.
    """

    budget: int | None = None
    min_prob: float = 0.0
    curve: Path | None = None
    fixed: bool = False


class VerificationPlan(NamedTuple):
    """A planner, and what it does in words."""

    planner: Planner
    words: str


def choose_plan(effort: Effort, loaded: "LoadedModel") -> VerificationPlan:
    """Return the planner of a model: by its cost curve, or where none was measured by a typical one of such devices.

    Raises:
        CurveError: the curve that was named cannot be read, or is that of another model or device.
    """
    from draftstore.hf.tuning import conditions_of, find_curve, load_curve

    device = loaded.model.device.type
    if effort.fixed:
        budget = FIXED_BUDGETS.get(device, BUDGET) if effort.budget is None else effort.budget
        return VerificationPlan(Fixed(budget), f"at most {counted(budget, 'node')} a pass, whatever the cost")
    budget = BUDGET if effort.budget is None else effort.budget
    named = effort.curve
    curve = find_curve(loaded.model) if named is None else load_curve(named, conditions_of(loaded.model))
    words = f"at most {counted(budget, 'node')} a pass, where they are worth their cost"
    if curve is None:
        words += f" on a typical {device}: `draftstore tune` measures this one"
    return VerificationPlan(CostPlanner(curve or TYPICAL.get(device, TYPICAL["cuda"]), budget), words)
