"""`draftstore worker`: a model with speculative decoding behind OpenAI's API."""

import sys
from typing import TYPE_CHECKING, Any

import click

from draftstore.assembly.sources import Sources
from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, say
from draftstore.errors import needs_extra
from draftstore.hf.loading import ModelOptions
from draftstore.hf.planning import Effort
from services.common import logs
from services.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from services.worker.answers import Engine


@click.command(cls=Command)
@takes(model=ModelOptions, sources=Sources, effort=Effort, settings=WorkerSettings, log=logs.LogOptions)
@json_option
def worker(
    model: ModelOptions,
    sources: Sources,
    effort: Effort,
    settings: WorkerSettings,
    log: logs.LogOptions,
    as_json: bool,
) -> None:
    """Serve a model over an OpenAI-compatible API with speculative decoding.

    It serves /v1/chat/completions, /v1/completions, /v1/responses (also as streams), /v1/models, /healthz, /readyz
    and /metrics. Requests are decoded in a continuous batch. Drafts come from stores, from a release of the lookup
    service, and from the request itself; `metrics` of each answer counts the accepted ones. Without a chat template,
    conversations are written as `USER: hi ASSISTANT:`.

    \b
    Examples:
      draftstore worker --model ./Qwen3-8B --store stores/chat
      draftstore worker --model org/model --release chat --lookup 'unix:/run/draftstore/lookup-*.sock' --recycling
      draftstore worker --model ./model --host 0.0.0.0 --tokens tokens.toml --log-format json
      curl http://127.0.0.1:8000/v1/chat/completions --json '{"messages": [{"role": "user", "content": "Hi"}]}'

    \b
    The model's own answers make the best stores:
      draftstore worker --model ./model --response-log answers.jsonl
      draftstore build rest --corpus answers.jsonl --tokenizer ./model --out stores/answers

    PRIVACY: with --response-log, anyone who can read these files can read requests and answers; anyone with a store
    built from them can read pieces. Only their owner can read the files, but they are not encrypted. The worker's own
    log holds no text of requests.

    SIGTERM and Ctrl-C stop it once accepted requests are answered (a second one: immediately); SIGHUP reloads tokens.
    """

    def load() -> "Engine":
        from services.worker.model import load_engine  # torch takes seconds to import

        return load_engine(model, sources, effort, settings)

    with needs_extra("torch", "services,hf"):
        from services.worker.running import run

        logs.configure(log)
        run(settings, load, print_json if as_json else _print_started)


def _print_started(started: dict[str, Any]) -> None:
    say(f"serving {started['model']} on {started['device']}, {started['positions']:,} positions")
    say(f"drafts  {', '.join(started['drafters']) or 'none'}")
    say(f"api     {started['url']}/v1")
    if started["needs_token"]:
        say("access  with a bearer token, see `draftstore tokens`")
    sys.stdout.flush()
