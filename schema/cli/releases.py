"""`draftstore releases`: names that point at builds."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import (
    count_progress,
    json_option,
    print_json,
    printable,
    status,
    stderr_console,
    stdout_console,
)
from schema import catalogue
from schema.catalogue import Candidate, Moved, RefusedError
from schema.cli.common import catalogue_session, counts, number_text, time_text
from schema.gates import CHECKS, replay_rows
from schema.models import Build
from schema.recordings import Replayed, Rule


@click.group()
def releases() -> None:
    """Point a name at a build, move it back, see where it was.

    \b
    Examples:
      draftstore releases publish chat-vicuna 7
      draftstore releases rollback chat-vicuna
    """


@releases.command("list")
@json_option
def list_releases(as_json: bool) -> None:
    """List the releases and the build that each points at.

    \b
    Example:
      draftstore releases list
    """
    with catalogue_session() as session:
        rows = catalogue.list_releases(session)
    if as_json:
        print_json([_fields(release.name, release.build, release.moved_at) for release in rows])
        return
    table = Table("release", "build", "kind", "name", "tokens", "entries", "bytes", "moved (UTC)", "store")
    for release in rows:
        build = release.build
        table.add_row(
            release.name,
            str(build.id),
            build.kind,
            printable(build.name),
            number_text(build.corpus.tokens if build.corpus else None),
            number_text(counts(build).get("entries")),
            number_text(build.size_bytes),
            time_text(release.moved_at),
            printable(build.path),
        )
    stdout_console().print(table if rows else "no releases: `draftstore releases publish NAME DIR` makes one")


@releases.command()
@click.argument("name")
@click.argument("build", metavar="ID|DIR")
@click.option(
    "--force",
    default="",
    metavar="CHECK[,CHECK...]",
    help=f"Publish although these checks fail: {', '.join(CHECKS)}.",
)
@json_option
def publish(name: str, build: str, force: str, as_json: bool) -> None:
    """Point a release at a build, after every byte of its store was read and found right.

    A build is refused, with exit status 3, if it has another tokenizer, model, kind or strategy than the live one, if
    its corpus or tokens are more than 20 % below it, or if more than 1 % of its records are bad; --force names what you
    override. Both builds replay the recordings of the release (`draftstore replays`), and one that accepts fewer
    tokens is refused too. A directory that the catalogue does not know yet is registered first, and stays so.

    \b
    Examples:
      draftstore releases publish chat-vicuna 7
      draftstore releases publish chat-vicuna stores/chat --force corpus,tokens
    """
    build_id = int(build) if build.isdecimal() else _registered(Path(build))
    try:
        moved = catalogue.publish(
            catalogue_session,
            name,
            build_id,
            force=force.split(",") if force else (),
            verify=_verify_with_bar,
            measure=_measure_with_status,
        )
    except RefusedError as refused:
        _print_replays(refused.new, refused.live)
        raise
    _print_move(moved, as_json)


@releases.command()
@click.argument("name")
@json_option
def rollback(name: str, as_json: bool) -> None:
    """Point a release at the build before; repeated, it goes further back. It takes no longer for a large store.

    \b
    Example:
      draftstore releases rollback chat-vicuna
    """
    _print_move(catalogue.rollback(catalogue_session, name), as_json)


@releases.command()
@click.argument("name")
@json_option
def remove(name: str, as_json: bool) -> None:
    """Remove a release and its history; the builds that it pointed at stay.

    \b
    Example:
      draftstore releases remove chat-test
    """
    with catalogue_session() as session:
        build_id = catalogue.remove(session, name)
    if as_json:
        print_json({"release": name, "build": build_id, "removed": True})
    else:
        click.echo(f"{name} is removed; it pointed at build {build_id}")


@releases.command()
@click.argument("name")
@json_option
def history(name: str, as_json: bool) -> None:
    """List every move of a release, newest first.

    \b
    Example:
      draftstore releases history chat-vicuna
    """
    with catalogue_session() as session:
        moves = catalogue.release_history(session, name)[::-1]
    if as_json:
        print_json(
            [
                {
                    "action": move.action,
                    "from": move.from_build,
                    "to": move.to_build,
                    "moved_at": move.moved_at.isoformat(),
                    "accepted_lengths": move.lengths,
                }
                for move in moves
            ]
        )
        return
    table = Table("moved (UTC)", "action", "from build", "to build", "accepted length")
    for move in moves:
        table.add_row(
            time_text(move.moved_at),
            move.action,
            number_text(move.from_build),
            number_text(move.to_build),
            ", ".join(f"{printable(recording)} {length:.3f}" for recording, length in move.lengths.items()),
        )
    stdout_console().print(table)


def _registered(directory: Path) -> int:
    """Return the build of a store."""
    with catalogue_session() as session:
        return catalogue.add_build(session, directory).id


def _verify_with_bar(build: Candidate) -> list[str]:
    """Verify a build, with a progress bar on a terminal."""
    with count_progress("bytes") as bars:
        task = bars.add_task("verifying", total=build.size_bytes, detail="")
        return catalogue.verify_build(build, lambda size: bars.advance(task, size))


def _measure_with_status(rule: Rule, builds: Sequence[Candidate]) -> list[Replayed]:
    """Replay a recording, with a spinner on a terminal."""
    from schema.replaying import measure  # imports all kernels

    with status(f"replaying {printable(rule.name)}"):
        return measure(rule, builds)


def _fields(name: str, build: Build | Candidate, moved_at: datetime) -> dict[str, Any]:
    return {
        "release": name,
        "build": build.id,
        "kind": build.kind,
        "name": build.name,
        "path": build.path,
        "bytes": build.size_bytes,
        "moved_at": moved_at.isoformat(),
    }


def _print_move(moved: Moved, as_json: bool) -> None:
    """Print the builds that a release points at now and pointed at before, and the checks that were not passed."""
    build, before = moved.build, moved.before
    if as_json:
        checks = {"forced": moved.verdict.forced, "skipped": moved.verdict.skipped}
        fields = _fields(moved.name, build, moved.moved_at) | {"before": before} | checks
        print_json(fields | {"replays": replay_rows(build, moved.live)})
        return
    _print_replays(build, moved.live)
    for sentence in moved.verdict.sentences():
        click.echo(sentence, err=True)
    was = "" if before is None else f" (before: build {before})"
    if before == build.id:
        was = " already"
    click.echo(f"{moved.name} points at build {build.id}{was}")


def _print_replays(new: Candidate, live: Candidate | None) -> None:
    """Print the accepted lengths of a new build and the live one, on stderr."""
    rows = replay_rows(new, live)
    table = Table("recording", "", "build", "accepted length")
    for row in rows:
        table.add_row(
            printable(row["recording"]), row["as"], str(row["build"]), f"{row['accepted_length']:.3f}"
        )
    if rows:
        stderr_console().print(table)
