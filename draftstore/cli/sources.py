"""Options of commands that decode: the model, sources of drafts, and how much to verify."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from draftstore.assembly import Sources
from draftstore.cli.common import STORE, strategy_option
from draftstore.hf.loading import DTYPES
from draftstore.hf.planning import Effort
from draftstore.remote.client import DEADLINE
from draftstore.stores.crest.entries import BACKENDS
from draftstore.stores.rest.store import BUDGET
from draftstore.trees.frontier import MAX_BUDGET

TOKEN_VARIABLE = "DRAFTSTORE_TOKEN"  # noqa: S105 (the name of a variable)

model_option = click.option(
    "--model",
    required=True,
    metavar="M",
    help="Model: a directory, a hub name organisation/model, or a GGUF file.",
)
device_option = click.option(
    "--device", metavar="D", help="Device: cpu, cuda, cuda:1, ... [default: the GPU, if there is one]"
)
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="Data type of the weights. [default: auto; on CPUs float32]"
)
attention_option = click.option(
    "--attention", metavar="A", help="Attention: sdpa, eager or flex_attention. [default: the model's]"
)
temperature_option = click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Temperature of sampling; 0 always takes the most likely token.",
)
top_p_option = click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the most likely tokens, up to this probability mass.",
)


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for sources of drafts; the command gets them as one argument `sources`."""
    options = (
        click.option(
            "--store", "stores", multiple=True, type=STORE, metavar="DIR",
            help="Draft from this store; Token Recycling starts from a store of kind recycling. Stores of kind dresd "
            "and recycling must belong to this model. May be repeated.",
        ),
        strategy_option,
        click.option("--backend", type=click.Choice(BACKENDS), help="Backend that holds the entries of CREST stores."),
        click.option(
            "--lookup", metavar="ADDRESS",
            help="Draft from a lookup service: unix:/path, host:port or tls://host:port; or from several, with commas "
            "between them, each with a part of the texts. [default: this user's own, with --release]",
        ),
        click.option("--release", metavar="NAME", help="Release or store to ask the lookup service for."),
        click.option(
            "--lookup-token", "token", envvar=TOKEN_VARIABLE, metavar="TOKEN",
            help=f"Bearer token, if the service asks for one; ${TOKEN_VARIABLE} keeps it out of process lists.",
        ),
        click.option(
            "--lookup-deadline", "deadline", type=click.FloatRange(0, 60, min_open=True), metavar="SECONDS",
            help="Longest wait of a step for the lookup service; networks and partitions need more. "
            f"[default: {DEADLINE}]",
        ),
        click.option(
            "--request/--no-request", default=True, show_default=True,
            help="Draft from the prompt and the output so far.",
        ),
        click.option(
            "--recycling/--no-recycling", default=False, show_default=True,
            help="Draft from the model's last candidates.",
        ),
    )  # fmt: skip

    def gather(values: dict[str, Any]) -> Sources:
        return Sources(stores=values.pop("stores"), **{key: values.pop(key) for key in _SOURCE_KEYS})

    return _with(command, options, "sources", gather)


_SOURCE_KEYS = ("strategy", "backend", "lookup", "release", "token", "deadline", "request", "recycling")


def effort_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for how much to verify; the command gets them as one argument `effort`."""
    options = (
        click.option(
            "--budget", type=click.IntRange(0, MAX_BUDGET),
            help=f"Maximum number of nodes in a draft. [default: {BUDGET}]",
        ),
        click.option("--min-prob", type=click.FloatRange(0, 1), default=0.0, help="Minimum probability of a node."),
        click.option(
            "--curve", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
            help="Cost curve of forward passes. [default: the one that `draftstore tune` stored for this model, else a "
            "typical one]",
        ),
        click.option(
            "--fixed-budget", "fixed", is_flag=True, help="Verify whole drafts, whatever they cost."
        ),
    )  # fmt: skip

    def gather(values: dict[str, Any]) -> Effort:
        return Effort(**{key: values.pop(key) for key in Effort._fields})

    return _with(command, options, "effort", gather)


def _with(
    command: Callable[..., None],
    options: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...],
    name: str,
    gather: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """Add options to a command, which gets them as one argument made by `gather`."""

    @wraps(command)
    def gathered(**values: Any) -> None:
        command(**{name: gather(values)}, **values)

    for option in reversed(options):
        gathered = option(gathered)
    return gathered
