"""`draftstore check-model`: whether drafts leave a model's output as it is."""

import sys
from time import perf_counter

import click

from draftstore.cli.common import json_option, print_json, printable, status
from draftstore.cli.sources import attention_option, device_option, dtype_option
from draftstore.errors import needs_extra


@click.command("check-model")
@click.argument("model")
@device_option
@dtype_option
@attention_option
@json_option
def check_model(
    model: str, device: str | None, dtype: str | None, attention: str | None, as_json: bool
) -> None:
    """Return True if a model reads several tokens at once as it reads them one by one.

    Drafts change no output of such a model. The others are refused, here with status 1. Decoding with drafts does the
    same check at the first use of a model.

    \b
    Example:
      draftstore check-model models/SmolLM2-135M-Instruct
    """
    with needs_extra("torch", "hf"):
        from draftstore.hf.exactness import examine
        from draftstore.hf.loading import load_model
    with status(f"loading {printable(model)}"):
        loaded = load_model(model, device=device, dtype=dtype, attention=attention)
    begin = perf_counter()
    found = examine(loaded.model)
    facts = {
        "model": loaded.name,
        "architecture": type(loaded.model).__name__,
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "exact": not found.fault,
        "drafts": "trees" if found.trees else "chains",
        "fault": found.fault or None,
        "deviation": found.deviation,
        "tolerance": found.tolerance,
        "seconds": round(perf_counter() - begin, 3),
    }
    if as_json:
        print_json(facts)
    else:
        about = f"{printable(loaded.name)} ({facts['architecture']}, {facts['dtype']}, {facts['device']})"
        if found.fault:
            click.echo(f"refused  {about} {found.fault}")
        else:
            click.echo(
                f"exact  {about} takes drafts, as {facts['drafts']}: tokens read together or one by one give the same "
                f"logits (to {found.deviation:.1g} of their spread; rounding explains {found.tolerance:.1g})"
            )
    if found.fault:
        sys.exit(1)
