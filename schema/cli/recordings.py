"""`draftstore recordings`: recordings that builds replay before a release moves."""

from pathlib import Path

import click

from draftstore.cli.options import Group, SpreadCommand, takes
from draftstore.cli.output import Columns, json_option, print_result, print_rows
from draftstore.decoding.replay import check_recordings
from draftstore.errors import counted
from schema.catalogue.recordings import ReplayRule, add_recording, list_recordings, remove_recording
from schema.cli.common import catalogue_session, row_fields

HIDDEN = ("slowdown", "created_at")
"""Columns that the command does not show."""


@click.group(cls=Group)
def recordings() -> None:
    """Register recorded outputs that every new build of a release must pass.

    `draftstore releases publish`, and flows with a release, replay them with the new build and the live one. A build is
    refused if it accepts fewer tokens.

    \b
    Examples:
      draftstore recordings add chats chats.jsonl.zst --release chat-vicuna --recorded-by vicuna-7b-v1.5 --rows 200
      draftstore recordings list
    """


@recordings.command(cls=SpreadCommand)
@click.argument("name")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--release",
    "releases",
    multiple=True,
    required=True,
    metavar="R...",
    help="Replay it before these releases move; they need not exist yet.",
)
@takes(rule=ReplayRule)
@json_option
def add(rule: ReplayRule, releases: tuple[str, ...], as_json: bool) -> None:
    """Register a file of recorded outputs for one or more releases.

    FILE is as for `draftstore replay`: JSON Lines with `prompt` and `output`, optionally compressed. Use 100 to 500
    outputs that the stores do not contain. The file must stay in place.

    \b
    Examples:
      draftstore recordings add chats chats.jsonl.zst --release chat-vicuna --recorded-by vicuna-7b-v1.5 --rows 200
      draftstore recordings add code code.jsonl --release code --request --tolerance 0.05
    """
    count = check_recordings(rule.path, model=rule.model, limit=rule.rows)
    with catalogue_session(make=True) as session:
        recording = add_recording(session, rule, releases)
    text = f"{rule.name}: {counted(count, 'output')}, replayed before {', '.join(recording.releases)} moves"
    print_result(row_fields(recording, *HIDDEN) | {"outputs": count}, as_json, text)


@recordings.command("list")
@click.option("--release", metavar="R", help="List only those of this release.")
@json_option
def list_command(release: str | None, as_json: bool) -> None:
    """List the registered recordings and how much of the accepted length a new build may lose.

    \b
    Examples:
      draftstore recordings list
      draftstore recordings list --release chat-vicuna
    """
    with catalogue_session() as session:
        rows = [row_fields(recording, *HIDDEN) for recording in list_recordings(session, release)]
    columns: Columns = {
        "name": "name",
        "releases": "releases",
        "model": "model",
        "request": "request",
        "rows": "rows",
        "budget": "budget",
        "M may fall": lambda row: f"{row['tolerance']:.1%}",
        "file": "path",
    }
    print_rows(rows, columns, as_json, empty="no recordings: `draftstore recordings add` registers one")


@recordings.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove a recording from the checks of releases. Its file and the results of its replays stay.

    \b
    Example:
      draftstore recordings remove chats
    """
    with catalogue_session() as session:
        remove_recording(session, name)
    print_result({"recording": name, "removed": True}, as_json, f"{name} is removed")
