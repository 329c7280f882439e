"""Choice of a planner for a loaded model, by the cost of its forward passes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from draftstore.decoding.budget import CostPlanner, Fixed, Planner
from draftstore.decoding.curve import CostCurve, Costs
from draftstore.errors import counted
from draftstore.options import Options, Shown
from draftstore.trees.frontier import BUDGET, MAX_BUDGET

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

FIXED_BUDGETS = {"cpu": 8}
"""Default budgets with `fixed` effort, by device: on a CPU every node is expensive."""
TYPICAL = {
    "cpu": CostCurve(
        (1, 2, 4, 8, 16, 32, 64, 128), (1.0, 1.5, 1.5, 1.8, 2.2, 2.8, 4.3, 7.0),
        batches=(
            Costs(8, (1, 2, 4, 8, 16, 32, 64), (1.9, 2.3, 2.8, 4.3, 7.1, 14.0, 26.0)),
            Costs(32, (1, 2, 4, 8, 16), (3.5, 4.5, 7.8, 15.0, 27.0)),
        ),
    ),
    "cuda": CostCurve(
        (1, 2, 4, 8, 16, 32, 64, 128), (1.0, 1.06, 1.09, 1.11, 1.17, 1.19, 1.25, 1.3), padded=True,
        batches=(
            Costs(8, (1, 2, 4, 8, 16, 32, 64), (1.08, 1.17, 1.18, 1.22, 1.29, 1.57, 2.42)),
            Costs(32, (1, 2, 4, 8, 16), (1.26, 1.35, 1.41, 1.7, 2.53)),
        ),
    ),
}  # fmt: skip
"""Default curves if none was measured, relative to a plain pass of one text: of a small model on two cores, and of an
8B model on an H200. They prevent verification of drafts that are not worth it."""


class Effort(Options):
    """How much of a draft to verify."""

    budget: Annotated[
        int | None, Shown(unset=f"{BUDGET}; with --fixed-budget on a CPU {FIXED_BUDGETS['cpu']}")
    ] = Field(None, ge=0, le=MAX_BUDGET, description="Maximum number of nodes in a draft.", examples=[16])
    min_prob: float = Field(0.0, ge=0, le=1, description="Minimum probability of a node.", examples=[0.05])
    curve: Annotated[
        Path | None, Shown(unset="that of `draftstore tune` for this model, else a typical one", expert=True)
    ] = Field(None, description="Cost curve of forward passes.", examples=["curves/a100.json"])
    fixed: Annotated[bool, Shown(flags=("--fixed-budget",), expert=True)] = Field(
        False, description="Verify whole drafts, regardless of cost."
    )


class VerificationPlan(NamedTuple):
    """A planner, its description, and the seconds of a plain pass, 0 if they were not measured."""

    planner: Planner
    words: str
    seconds: float = 0.0


def choose_plan(effort: Effort, loaded: "LoadedModel") -> VerificationPlan:
    """Return a planner for a model: with its measured cost curve, else one typical of such devices.

    CurveError if the named curve cannot be read, or belongs to another model or device.
    """
    from draftstore.hf.tuning import conditions_of, find_curve

    model, named = loaded.model, effort.curve
    curve = find_curve(model) if named is None else CostCurve.load(named).require(conditions_of(model))
    device = model.device.type
    seconds = curve.cost(1) if curve else 0.0
    if effort.fixed:
        budget = FIXED_BUDGETS.get(device, BUDGET) if effort.budget is None else effort.budget
        return VerificationPlan(
            Fixed(budget), f"at most {counted(budget, 'node')} per pass, regardless of cost", seconds
        )
    budget = BUDGET if effort.budget is None else effort.budget
    words = f"at most {counted(budget, 'node')} per pass, if worth their cost"
    if curve is None:
        words += f" on a typical {device}: `draftstore tune` measures this one"
    planner = CostPlanner(curve or TYPICAL.get(device, TYPICAL["cuda"]), budget)
    return VerificationPlan(planner, words, seconds)
