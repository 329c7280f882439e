"""`draftstore worker`: a model with speculative decoding behind OpenAI's API."""

import sys
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import click

from draftstore.assembly import Sources
from draftstore.cli.common import json_option, print_json, printable
from draftstore.cli.crest import ByteSize
from draftstore.cli.sources import (
    attention_option,
    device_option,
    effort_options,
    model_option,
    source_options,
)
from draftstore.errors import MissingExtraError
from draftstore.hf.planning import Effort
from services.cli.options import access_options, log_options
from services.common.addresses import LOOPBACK, ListenAddress
from services.worker.settings import BATCH, PORT, WorkerSettings


@click.command()
@model_option
@click.option(
    "--name", help="Name of the model for clients. [default: that of the directory, the file or the hub]"
)
@device_option
@click.option(
    "--dtype",
    metavar="T",
    help="Data type of the weights: auto, float32, bfloat16, ... [default: auto; on CPUs float32]",
)
@attention_option
@source_options
@effort_options
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the lookup service to serve the release. [default: give up after 10 seconds]",
)
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(1, 64),
    default=BATCH,
    show_default=True,
    help="Maximum number of answers that are decoded together; 1 decodes them one by one.",
)
@click.option(
    "--max-tokens-in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum tokens of these answers and their prompts together. [default: what there is memory for]",
)
@click.option(
    "--queue",
    type=click.IntRange(0, 10_000),
    default=16,
    show_default=True,
    help="Number of requests that may wait while others are answered; the next gets 429.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Maximum number of tokens in an answer.",
)
@click.option(
    "--max-choices",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Maximum number of answers to a request: n times its prompts.",
)
@click.option(
    "--tokens",
    "--token-file",
    "tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Require bearer tokens, see `draftstore tokens`; a token for a release of the model's name allows the model.",
)
@access_options
@click.option(
    "--grace-seconds",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    help="Seconds for the requests that have begun to finish when the worker stops.",
)
@click.option(
    "--response-log",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="DRAFTSTORE_RESPONSE_LOG",
    show_envvar=True,
    metavar="FILE",
    help="Keep finished answers with their prompts, as a corpus in JSON Lines: see PRIVACY below.",
)
@click.option(
    "--response-log-bytes",
    type=ByteSize(),
    default="1GB",
    show_default=True,
    help="Maximum size of the log; its older half, FILE with .1 before the ending, is deleted first.",
)
@log_options
@json_option
def worker(
    model: str,
    name: str | None,
    device: str | None,
    dtype: str | None,
    attention: str | None,
    sources: Sources,
    effort: Effort,
    wait: bool,
    max_batch: int,
    max_tokens_in_flight: int | None,
    host: str,
    port: int,
    as_json: bool,
    **more: Any,
) -> None:
    """Answer OpenAI's API with a model that decodes with drafts: the same words, in fewer forward passes.

    It serves /v1/completions and /v1/chat/completions (also as streams), /v1/models, /healthz, /readyz and /metrics.
    Requests are decoded together: each joins the batch when it comes and leaves it when it is answered. Drafts come
    from stores, from a release of the lookup service, and from the request itself; `usage` of each answer tells what
    they saved. Without a chat template, conversations are written as `USER: hi ASSISTANT:`.

    \b
    Examples:
      draftstore worker --model ./Qwen3-8B --store stores/chat
      draftstore worker --model org/model --release chat --lookup unix:/run/draftstore/lookup.sock --recycling
      draftstore worker --model ./model --host 0.0.0.0 --tokens tokens.toml --log-format json
      curl http://127.0.0.1:8000/v1/chat/completions --json '{"messages": [{"role": "user", "content": "Hi"}]}'

    \b
    The model's own answers make the best stores:
      draftstore worker --model ./model --response-log answers.jsonl
      draftstore build rest --corpus answers.jsonl --tokenizer ./model --out stores/answers

    PRIVACY: with --response-log, whoever can read these files reads what people asked and were told, and so does, in
    pieces, whoever gets a store that is built of them. Only their owner may read them, but they are not encrypted. The
    log of the worker itself holds no text of requests.

    SIGTERM and Ctrl-C end it after the answers in hand (a second time: at once), SIGHUP has it read the file of tokens
    again.
    """
    try:
        from services.worker.loading import LOOKUP_WAIT_SECONDS, load_engine
        from services.worker.running import run
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "services,hf") from None
    settings = WorkerSettings(endpoint=ListenAddress(host, port), **more)
    load = partial(
        load_engine,
        model,
        sources,
        effort,
        name=name,
        device=device,
        dtype=dtype,
        attention=attention,
        patience=inf if wait else LOOKUP_WAIT_SECONDS,
        most=max_batch,
        tokens=max_tokens_in_flight,
    )
    sys.exit(run(settings, load, print_json if as_json else _print_started))


def _print_started(started: dict[str, Any]) -> None:
    """Print the served model and addresses."""
    click.echo(
        f"serving {printable(started['model'])} on {started['device']}, {started['positions']:,} positions"
    )
    click.echo(f"drafts  {printable(', '.join(started['drafters']) or 'none')}")
    click.echo(f"api     {started['url']}/v1")
    if started["needs_token"]:
        click.echo("access  with a bearer token, see `draftstore tokens`")
    sys.stdout.flush()
