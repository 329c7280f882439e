"""`draftstore replays`: recordings that builds replay before a release moves."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import ManyValues, json_option, print_json, printable, stdout_console
from draftstore.decoding.replay import check_recordings
from draftstore.errors import counted
from draftstore.trees.frontier import MAX_BUDGET
from schema import catalogue
from schema.cli.common import catalogue_session, number_text
from schema.models import Recording
from schema.recordings import TOLERANCE, Rule


@click.group()
def replays() -> None:
    """Register recorded outputs that a new build must do well on before a release moves to it.

    `draftstore releases publish`, and flows with a release, replay them with the new build and the live one. A build is
    refused if it accepts fewer tokens.

    \b
    Examples:
      draftstore replays add chats chats.jsonl.zst --release chat-vicuna --model vicuna-7b-v1.5 --rows 200
      draftstore replays list
    """


class ManyReleases(ManyValues):
    """A command that takes `--release a b`."""

    many = frozenset({"--release"})


@replays.command(cls=ManyReleases)
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--release",
    "releases",
    multiple=True,
    required=True,
    metavar="R...",
    help="Replay it before these releases move; they need not exist yet.",
)
@click.option("--model", metavar="M", help="Replay only the outputs of this model.")
@click.option("--request", is_flag=True, help="Draft from the prompt and the output so far, too.")
@click.option(
    "--rows", type=click.IntRange(min=1), metavar="N", help="Replay at most N outputs. [default: all]"
)
@click.option(
    "--budget",
    type=click.IntRange(1, MAX_BUDGET),
    default=64,
    show_default=True,
    help="Maximum number of nodes in a draft.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, max_open=True),
    default=TOLERANCE,
    show_default=True,
    metavar="SHARE",
    help="Refuse a build whose accepted length is more than this share below the live one's.",
)
@json_option
def add(name: str, file: Path, releases: tuple[str, ...], as_json: bool, **rule: Any) -> None:
    """Register a file of recorded outputs for one or more releases.

    FILE is what `draftstore replay` takes: JSON Lines with `prompt` and `output`, also compressed. Take 100 to 500
    outputs that the stores have not seen. The command reads the file; later it must be where it was.

    \b
    Examples:
      draftstore replays add chats chats.jsonl.zst --release chat-vicuna --model vicuna-7b-v1.5 --rows 200
      draftstore replays add code code.jsonl --release code --request --tolerance 0.05
    """
    count = check_recordings(file, model=rule["model"], limit=rule["rows"])
    with catalogue_session() as session:
        recording = catalogue.add_recording(session, Rule(name, file, **rule), releases)
    if as_json:
        print_json(_fields(recording) | {"outputs": count})
    else:
        click.echo(
            f"{printable(name)}: {counted(count, 'output')}, replayed before {', '.join(recording.releases)} moves"
        )


@replays.command("list")
@click.option("--release", metavar="R", help="List only those of this release.")
@json_option
def list_replays(release: str | None, as_json: bool) -> None:
    """List the registered recordings, and how much of the accepted length a new build may lose.

    \b
    Examples:
      draftstore replays list
      draftstore replays list --release chat-vicuna
    """
    with catalogue_session() as session:
        rows = catalogue.list_recordings(session, release)
    if as_json:
        print_json([_fields(recording) for recording in rows])
        return
    table = Table("name", "releases", "model", "request", "rows", "budget", "M may fall", "file")
    for recording in rows:
        table.add_row(
            printable(recording.name),
            ", ".join(recording.releases),
            recording.model or "",
            "yes" if recording.request else "",
            number_text(recording.rows),
            str(recording.budget),
            f"{recording.tolerance:.1%}",
            printable(recording.path),
        )
    stdout_console().print(table if rows else "no recordings: `draftstore replays add` registers one")


@replays.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove a recording: releases move without it. Its file and the results of its replays stay.

    \b
    Example:
      draftstore replays remove chats
    """
    with catalogue_session() as session:
        catalogue.remove_recording(session, name)
    if as_json:
        print_json({"recording": name, "removed": True})
    else:
        click.echo(f"{printable(name)} is removed")


def _fields(recording: Recording) -> dict[str, Any]:
    """Return a recording as JSON values."""
    return {name: getattr(recording, name) for name in (*Rule._fields, "releases")}
