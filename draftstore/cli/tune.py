"""`draftstore tune`: the cost of a forward pass on this device, which determines the size of drafts."""

import dataclasses
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from draftstore.cli.common import progress_bars, status
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.decoding.curve import CONTEXT, REPEATS, SPREAD, CostCurve
from draftstore.errors import needs_extra
from draftstore.hf.loading import ModelOptions
from draftstore.options import Options, Shown


class Measuring(Options):
    """Options of the measurement."""

    context: int = Field(CONTEXT, ge=1, description="Number of tokens in the cache.")
    repeats: int = Field(
        REPEATS, ge=4, description="Number of timed passes of each size; more if they differ too much."
    )
    spread: float = Field(
        SPREAD,
        ge=0,
        description="Allowed relative spread of the fastest quarter of the passes. If they differ more, the "
        "machine is busy, and no curve is stored.",
    )
    out: Annotated[Path | None, Shown(unset="where `generate` and `worker` look for it")] = Field(
        None, description="File of the curve."
    )


@click.command(cls=Command)
@takes(model=ModelOptions, options=Measuring)
@json_option
def tune(model: ModelOptions, options: Measuring, as_json: bool) -> None:
    """Measure a model's forward pass over 1 to 128 tokens at once.

    A draft of n nodes is verified by a pass over n + 1 tokens. The curve is stored where `generate` and `worker`
    find it for the same model on the same device; run it on an idle machine.

    \b
    Example:
      draftstore tune --model models/SmolLM2-135M-Instruct
    """
    with needs_extra("torch", "hf"):
        from draftstore.hf import tuning
    with status(f"loading {model.model}"):
        loaded = model.load(model.model)
    before = tuning.find_curve(loaded.model)
    with progress_bars() as progress:
        curve = tuning.measure(
            loaded.model,
            context=options.context,
            repeats=options.repeats,
            spread=options.spread,
            name=loaded.name,
            on_pass=progress("measuring", "passes"),
        )
    assert curve.conditions is not None
    path = options.out or tuning.curve_path(curve.conditions)
    curve.save(path)
    if as_json:
        print_json({"path": path, **dataclasses.asdict(curve), "seconds_before": before and before.seconds})
    else:
        _show(curve, before)
        say(f"stored as {path}")


def _show(curve: CostCurve, before: CostCurve | None) -> None:
    if where := curve.conditions:
        threads = f", {where.threads} threads" if where.threads else ""
        say(f"{where.model}, {where.dtype}, {where.attention}, {curve.context} tokens in the cache")
        say(f"{where.device}{threads}")
    columns = {
        "rows": curve.rows,
        "nodes": [rows - 1 for rows in curve.rows],
        "ms": [round(1000 * seconds, 2) for seconds in curve.seconds],
        "plain passes": [round(seconds / curve.seconds[0], 2) for seconds in curve.seconds],
    }
    if before:
        columns["ms before"] = [round(1000 * before.cost(rows), 2) for rows in curve.rows]
    print_table(tuple(columns), zip(*columns.values(), strict=True))
