"""`draftstore serve`: the lookup service."""

import sys
from pathlib import Path
from typing import Any

import click

from draftstore.cli.common import json_option, print_json, printable
from draftstore.errors import LookupServiceError, MissingExtraError
from draftstore.remote.addresses import default_socket
from draftstore.stores.crest.entries import BACKENDS
from draftstore.stores.partition import Partition
from draftstore.trees.frontier import MAX_BUDGET
from services.cli.options import access_options, log_options
from services.common.addresses import LOOPBACK, ListenAddress
from services.lookup.limits import SHARED_BUDGET, Limits
from services.lookup.settings import DRAFT_PORT, HTTP_PORT, LookupSettings
from services.lookup.stores.targets import parse_store

NOWHERE = "none"
UNIX = "unix:"


@click.command()
@click.option(
    "--release",
    "releases",
    multiple=True,
    metavar="NAME",
    help="Serve a release of the catalogue. May be repeated.",
)
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="[NAME=]DIR",
    help="Serve a directory, under its own name or NAME. May be repeated.",
)
@click.option(
    "--backend", type=click.Choice(BACKENDS), help="Backend that holds the entries of CREST stores."
)
@click.option(
    "--partition",
    metavar="N/K",
    help="Serve the Nth of K parts of each REST store, for stores larger than a machine; other kinds are served whole.",
)
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Unix socket of the binary protocol. [default: $DRAFTSTORE_SOCKET, else a socket of this user]",
)
@click.option(
    "--socket-mode",
    default="600",
    show_default=True,
    metavar="OCTAL",
    help="Permissions of the Unix sockets: who on this machine may connect.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Address for the binary protocol over TCP; the port is {DRAFT_PORT} if none is named.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Encrypt --listen with this certificate (PEM, with those that lead to a trusted one); SIGHUP reads it again.",
)
@click.option(
    "--tls-key",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Its private key, without a passphrase. [default: in the same file]",
)
@click.option(
    "--http",
    metavar="HOST:PORT|unix:PATH",
    default=f"{LOOPBACK}:{HTTP_PORT}",
    show_default=True,
    help="Address or Unix socket for JSON, health, metrics and the page; anybody on this machine can reach an address. "
    f"`{NOWHERE}` switches them off.",
)
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Number of lookup processes."
)
@click.option(
    "--tokens",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Require bearer tokens from this file, see `draftstore tokens`.",
)
@click.option(
    "--max-budget",
    type=click.IntRange(1, MAX_BUDGET),
    help="Most nodes of a draft; a token may name another limit. [default: "
    f"{MAX_BUDGET:,} on a Unix socket for this user alone, {SHARED_BUDGET} over TCP and HTTP]",
)
@access_options
@click.option(
    "--wait",
    is_flag=True,
    help="Start even if nothing can be served yet; a release is served once it is published.",
)
@click.option(
    "--poll-seconds",
    type=click.FloatRange(0.05, 3600),
    default=2.0,
    show_default=True,
    help="Seconds between two checks of the catalogue.",
)
@click.option(
    "--notice-seconds",
    type=click.FloatRange(0, 3600),
    default=1.0,
    show_default=True,
    help="Seconds that /readyz answers 503 before the service stops to take requests, for load balancers to notice.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds for clients to go elsewhere when the service stops.",
)
@click.option(
    "--hang-seconds",
    type=click.FloatRange(1, 3600),
    default=30.0,
    show_default=True,
    help="Seconds without a sign of life after which a worker or the HTTP process is replaced.",
)
@log_options
@json_option
def serve(
    releases: tuple[str, ...], stores: tuple[str, ...], backend: str | None, path: Path | None, socket_mode: str,
    listen: str | None, http: str, drain_seconds: float, partition: str | None, as_json: bool, **more: Any,
) -> None:  # fmt: skip
    """Serve drafts to decoding workers, until SIGTERM or Ctrl-C.

    Without --release and --store every release of the catalogue is served from which drafts can be made. Releases
    follow the catalogue: publishing or rolling back swaps the store between two requests.

    \b
    Examples:
      draftstore serve --store stores/chat
      draftstore serve --release chat-vicuna --release code --workers 2
      draftstore serve --store /share/web --partition 3/16 --listen :7781 --tokens tokens.toml
      draftstore serve --listen 0.0.0.0:7781 --http 0.0.0.0:7780 --tokens tokens.toml --log-format json

    Ctrl-C and SIGTERM end it without losing an answer, SIGHUP has it read the file of tokens again.
    """
    try:
        from services.lookup.processes.supervisor import run
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "services") from None
    named = http.removeprefix(UNIX) if http.startswith(UNIX) else ""
    targets = tuple(parse_store(store, backend) for store in stores)
    settings = LookupSettings(
        socket=path or default_socket(),
        socket_mode=_mode(socket_mode),
        listen=ListenAddress.parse(listen, DRAFT_PORT) if listen else None,
        http=None if http == NOWHERE or named else ListenAddress.parse(http, HTTP_PORT),
        http_socket=Path(named) if named else None,
        stores=targets,
        releases=releases,
        backend=backend,
        partition=None if partition is None else Partition.parse(partition),
        limits=Limits(drain_seconds=drain_seconds),
        **more,
    )
    names = [target.name for target in targets] + sorted(set(releases))
    if len(set(names)) < len(names):
        raise LookupServiceError(
            "two stores or releases have the same name: give a store another with --store NAME=DIR"
        )
    sys.exit(run(settings, print_json if as_json else _print_started))


def _mode(text: str) -> int:
    """Parse the permissions of a socket."""
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0o600 <= mode <= 0o777:
        raise LookupServiceError(
            f"--socket-mode {text} is not a mode: expected an octal number from 600 to 777, such as 660"
        )
    return mode


def _print_started(started: dict[str, Any]) -> None:
    """Print the served stores and addresses."""
    for release in started["releases"]:
        bound = release["target_model"] or release["tokenizer"]["name"]
        part = f", of which part {release['partition']}" if release["partition"] else ""
        click.echo(
            f"serving {release['name']}: {release['kind']} build {release['build']} for {printable(bound)}, "
            f"{release['entries']:,} entries{part}"
        )
    if not started["releases"]:
        click.echo("serving nothing yet: publish a release")
    click.echo(f"drafts  unix:{printable(started['socket'])}")
    if started["listen"]:
        click.echo(f"        {'tls' if started['tls'] else 'tcp'}://{started['listen']}")
    if started["url"]:
        click.echo(f"page    {started['url']}")
    if started["http_socket"]:
        click.echo(f"http    unix:{printable(started['http_socket'])}")
    if started["needs_token"]:
        click.echo("access  with a bearer token, see `draftstore tokens`")
    sys.stdout.flush()
