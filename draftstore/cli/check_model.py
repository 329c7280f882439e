"""`draftstore check-model`: whether drafts leave a model's output unchanged."""

import sys
from time import perf_counter

import click

from draftstore.cli.common import status
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, say
from draftstore.errors import needs_extra
from draftstore.hf.loading import Loading


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
