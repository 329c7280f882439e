"""`draftstore tune`: the cost of a forward pass on this device, which determines the size of drafts."""

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import count_progress, json_option, print_json, printable, status, stdout_console
from draftstore.cli.sources import attention_option, device_option, dtype_option, model_option
from draftstore.errors import needs_extra


@click.command()
@model_option
@device_option
@dtype_option
@attention_option
@click.option(
    "--cache",
    type=click.Choice(["dynamic", "static"]),
    help="Cache of keys and values. [default: static on a GPU, else dynamic]",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Number of tokens in the cache.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=9,
    show_default=True,
    help="Number of timed passes of each size.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of the curve. [default: where `generate` and `worker` look for it]",
)
@json_option
def tune(
    model: str,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    cache: str | None,
    context: int,
    repeats: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure how long a model's forward pass takes over 1 to 128 tokens at once.

    A draft of n nodes is verified by a pass over n + 1 tokens. The curve is stored where `generate` and `worker`
    find it for the same model on the same device; run it on a machine that does nothing else.

    \b
    Example:
      draftstore tune --model models/SmolLM2-135M-Instruct
    """
    with needs_extra("torch", "hf"):
        from draftstore.hf import tuning
        from draftstore.hf.loading import load_model
    with status(f"loading {printable(model)}"):
        loaded = load_model(model, device=device, dtype=dtype, attention=attention)
    with count_progress("passes") as bars:
        task = bars.add_task("measuring", total=None, detail="")
        curve = tuning.measure(
            loaded.model,
            context=context,
            repeats=repeats,
            cache=cache,
            name=loaded.name,
            on_pass=lambda done, total: bars.update(task, completed=done, total=total),
        )
    assert curve.conditions is not None
    path = out or tuning.curve_path(curve.conditions)
    curve.save(path)
    if as_json:
        print_json({"path": str(path), **dataclasses.asdict(curve)})
        return
    _show(curve)
    click.echo(f"stored as {printable(path)}")


def _show(curve: Any) -> None:
    """Print a curve as a table."""
    where = curve.conditions
    threads = f", {where.threads} threads" if where.threads else ""
    stdout_console().print(
        f"{printable(where.model)}, {where.dtype}, {where.attention}, {where.cache} cache of {curve.context} tokens\n"
        f"{where.device}{threads}"
    )
    table = Table()
    for column in ("rows", "nodes", "ms", "plain passes"):
        table.add_column(column, justify="right")
    for rows, seconds in zip(curve.rows, curve.seconds, strict=True):
        table.add_row(str(rows), str(rows - 1), f"{1000 * seconds:.2f}", f"{seconds / curve.seconds[0]:.2f}")
    stdout_console().print(table)
