"""`draftstore serve`: the lookup service."""

import sys
from typing import Any

import click

from draftstore.cli.options import Command, takes
from draftstore.cli.output import json_option, print_json, say
from draftstore.errors import needs_extra
from services.common import logs
from services.lookup.settings import LookupSettings


@click.command(cls=Command)
@takes(settings=LookupSettings, log=logs.LogOptions)
@json_option
def serve(settings: LookupSettings, log: logs.LogOptions, as_json: bool) -> None:
    """Serve drafts to decoding workers.

    Without --release and --store, it serves every release of the catalogue that can draft. When a release is published
    or rolled back, the service swaps its store between two requests.

    \b
    Examples:
      draftstore serve --store stores/chat
      draftstore serve --release chat-vicuna --release code
      draftstore serve --release chat-vicuna --live team=live/team:1000000
      draftstore serve --listen 0.0.0.0:7781 --http 0.0.0.0:7780 --tokens tokens.toml --log-format json

    One service uses one core for short requests. For more, start several over the same files: each with its own
    --socket and --http, all with the same --listen.

    Ctrl-C and SIGTERM stop it; SIGHUP reloads tokens and certificate.
    """
    with needs_extra("uvloop", "services"):
        from services.lookup.server import run
    logs.configure(log)
    run(settings, print_json if as_json else _print_started)


def _print_started(started: dict[str, Any]) -> None:
    for release in started["releases"]:
        if release["kind"] == "live":
            say(f"serving {release['name']}: live, {release['tokens']:,} tokens remembered")
            continue
        bound = release["target_model"] or release["tokenizer"]["name"]
        say(
            f"serving {release['name']}: {release['kind']} build {release['build']} for {bound}, "
            f"{release['entries']:,} entries"
        )
    if not started["releases"]:
        say("serving nothing yet: publish a release")
    say(f"drafts  unix:{started['socket']}")
    if started["listen"]:
        say(f"        {'tls' if started['tls'] else 'tcp'}://{started['listen']}")
    if started["url"]:
        say(f"page    {started['url']}")
    if started["http_socket"]:
        say(f"http    unix:{started['http_socket']}")
    if started["needs_token"]:
        say("access  with a bearer token, see `draftstore tokens`")
    sys.stdout.flush()
