"""`draftstore tune` and `check-model`: what passes of a model cost on this device, and whether drafts are exact."""

import dataclasses
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import click
from pydantic import Field, PositiveInt

from draftstore.cli.common import progress_bars, status
from draftstore.cli.options import Command, SpreadCommand, takes
from draftstore.cli.output import json_option, print_json, print_table, say
from draftstore.decoding.curve import BATCHES, CONTEXT, REPEATS, SPREAD, CostCurve
from draftstore.errors import needs_extra
from draftstore.hf.loading import Loading, ModelOptions
from draftstore.options import Options, Shown


class Measuring(Options):
    """Options of the measurement."""

    texts: Annotated[tuple[PositiveInt, ...], Shown(unset=" ".join(map(str, BATCHES)))] = Field(
        BATCHES,
        description="Numbers of texts in a batch, as far as they fit in memory; 1 measures no batches.",
    )
    context: int = Field(CONTEXT, ge=1, description="Number of tokens of each text in the cache.")
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


@click.command(cls=SpreadCommand)
@takes(model=ModelOptions, options=Measuring)
@json_option
def tune(model: ModelOptions, options: Measuring, as_json: bool) -> None:
    """Measure a model's forward pass over 1 to 128 tokens at once, of one text and of several together.

    A draft of n nodes is verified by a pass over n + 1 tokens, the rows of its text. The curve is stored where
    `generate` and `worker` find it for the same model on the same device; run it on an idle machine.

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
            texts=options.texts,
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
    sizes = [(costs.texts, rows) for costs in curve.every() for rows in costs.rows]
    columns = {
        "texts": [texts for texts, _ in sizes],
        "rows": [rows for _, rows in sizes],
        "nodes": [rows - 1 for _, rows in sizes],
        "ms": [round(1000 * curve.cost(rows, texts), 2) for texts, rows in sizes],
        "plain passes": [round(curve.cost(rows, texts) / curve.cost(1, texts), 2) for texts, rows in sizes],
    }
    if before:
        columns["ms before"] = [round(1000 * before.cost(rows, texts), 2) for texts, rows in sizes]
    print_table(tuple(columns), zip(*columns.values(), strict=True))


@click.command("check-model", cls=Command)
@click.argument("model")
@takes(loading=Loading)
@json_option
def check_model(model: str, loading: Loading, as_json: bool) -> None:
    """Check whether a model computes the same result for several tokens at once as one by one.

    Drafts never change the output of such a model. Others are refused; this command then exits with status 1. Decoding
    with drafts runs the same check when a model is first used. A few tokens are generated, too, with the model's own
    settings.

    \b
    Example:
      draftstore check-model models/SmolLM2-135M-Instruct
    """
    with needs_extra("torch", "hf"):
        from draftstore.hf import generation
    with status(f"loading {model}"):
        loaded = loading.load(model)
    begin = perf_counter()
    found = generation.check_model(loaded)
    facts = {
        "model": loaded.name,
        "architecture": type(loaded.model).__name__,
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "exact": not found.fault,
        "fault": found.fault or None,
        "deviation": found.deviation,
        "tolerance": found.tolerance,
        "seconds": round(perf_counter() - begin, 3),
    }
    about = f"{loaded.name} ({facts['architecture']}, {facts['dtype']}, {facts['device']})"
    if as_json:
        print_json(facts)
    elif found.fault:
        say(f"refused  {about} {found.fault}")
    else:
        say(
            f"exact  {about} supports drafts: tokens read together or one by one give the same logits "
            f"(deviation {found.deviation or 0:.1g} of their spread; rounding explains up to {found.tolerance:.1g})"
        )
    if found.fault:
        sys.exit(1)
