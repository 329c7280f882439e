"""`draftstore releases`: names that point at builds."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table
from sqlalchemy import select

from draftstore.cli.common import count_progress, json_option, print_json, printable, stdout_console
from schema import catalogue
from schema.cli.common import catalogue_session, counts, number_text, time_text
from schema.models import Build, Release


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
        print_json([_fields(release) for release in rows])
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
@json_option
def publish(name: str, build: str, as_json: bool) -> None:
    """Point a release at a build, after every byte of its store was read and found right.

    A directory that the catalogue does not know yet is registered first, and stays so.

    \b
    Examples:
      draftstore releases publish chat-vicuna 7
      draftstore releases publish chat-vicuna stores/chat
    """
    build_id = int(build) if build.isdecimal() else _registered(Path(build))
    with catalogue_session() as session:
        before = session.scalar(select(Release.build_id).filter_by(name=name))
        fields = _fields(catalogue.publish(session, name, build_id, verify=verify_with_bar))
    _tell(fields, before, as_json)


@releases.command()
@click.argument("name")
@json_option
def rollback(name: str, as_json: bool) -> None:
    """Point a release at the build before; repeated, it goes further back.

    \b
    Example:
      draftstore releases rollback chat-vicuna
    """
    with catalogue_session() as session:
        before = catalogue.get_release(session, name).build_id
        fields = _fields(catalogue.rollback(session, name, verify=verify_with_bar))
    _tell(fields, before, as_json)


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
                }
                for move in moves
            ]
        )
        return
    table = Table("moved (UTC)", "action", "from build", "to build")
    for move in moves:
        table.add_row(
            time_text(move.moved_at), move.action, number_text(move.from_build), number_text(move.to_build)
        )
    stdout_console().print(table)


def _registered(directory: Path) -> int:
    """Return the build of a store, in its own transaction: verification is slow and must not hold locks."""
    with catalogue_session() as session:
        return catalogue.add_build(session, directory).id


def verify_with_bar(build: Build) -> list[str]:
    """Verify a build, with a progress bar on a terminal."""
    with count_progress("bytes") as bars:
        task = bars.add_task("verifying", total=build.size_bytes, detail="")
        return catalogue.verify_build(build, lambda size: bars.advance(task, size))


def _fields(release: Release) -> dict[str, Any]:
    build = release.build
    return {
        "release": release.name,
        "build": build.id,
        "kind": build.kind,
        "name": build.name,
        "path": build.path,
        "bytes": build.size_bytes,
        "moved_at": release.moved_at.isoformat(),
    }


def _tell(fields: dict[str, Any], before: int | None, as_json: bool) -> None:
    """Print the builds that a release points at now and pointed at before."""
    if as_json:
        print_json(fields | {"before": before})
        return
    was = "" if before is None else f" (before: build {before})"
    if before == fields["build"]:
        was = " already"
    click.echo(f"{fields['release']} points at build {fields['build']}{was}")
