"""`draftstore builds`: the builds of the catalogue."""

from pathlib import Path
from typing import Any

import click
from rich.table import Table
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.cli.common import STORE, count_progress, json_option, print_json, printable, stdout_console
from draftstore.errors import StoreError, counted
from draftstore.storage.files import remove
from draftstore.storage.manifest import manifest_digest
from schema import catalogue
from schema.adding import has_statistics, load_statistics
from schema.catalogue import Verdict
from schema.cli.common import (
    build_fields,
    catalogue_session,
    corpus_fields,
    counts,
    number_text,
    time_text,
)
from schema.cli.pruning import prune
from schema.models import KINDS, STATES, Build, Release, Replay
from schema.publishing import GATES
from schema.statistics import HEAD


@click.group()
def builds() -> None:
    """List the builds in the catalogue, look at one, add a store, drop a build, remove old ones.

    \b
    Examples:
      draftstore builds list --kind crest
      draftstore builds show 7
    """


@builds.command("list")
@click.option("--kind", type=click.Choice(KINDS), help="List only builds of this kind.")
@click.option("--state", type=click.Choice(STATES), help="List only builds in this state.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of builds."
)
@json_option
def list_builds(kind: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List builds, newest first, with the releases that point at them.

    \b
    Example:
      draftstore builds list --kind crest --state finished
    """
    with catalogue_session() as session:
        catalogue.fail_cut_off(session)
        rows = catalogue.list_builds(session, kind=kind, state=state, limit=limit)
        live = _live(session)
    if as_json:
        print_json([build_fields(build) | {"releases": live.get(build.id, [])} for build in rows])
        return
    table = Table("id", "kind", "name", "state", "entries", "bytes", "started (UTC)", "seconds", "live as")
    for build in rows:
        table.add_row(
            str(build.id),
            build.kind,
            printable(build.name),
            build.state,
            number_text(counts(build).get("entries")),
            number_text(build.size_bytes),
            time_text(build.started_at),
            _seconds(build),
            ", ".join(live.get(build.id, [])),
        )
    stdout_console().print(table if rows else "no builds: `draftstore builds add DIR` adds a store")


@builds.command()
@click.argument("build", metavar="ID|DIR")
@json_option
def show(build: str, as_json: bool) -> None:
    """Show a build: corpus, parameters, sizes, timings, releases, replays, and why it failed.

    \b
    Examples:
      draftstore builds show 7
      draftstore builds show stores/chat
    """
    with catalogue_session() as session:
        catalogue.fail_cut_off(session)
        found = catalogue.find_build(session, build)
        corpus = found.corpus
        live = _live(session).get(found.id, [])
        replays = session.scalars(select(Replay).filter_by(build_id=found.id).order_by(Replay.id)).all()
    parameters = dict(found.parameters)
    gates = parameters.pop(GATES, {})
    if as_json:
        more = {"corpus": corpus_fields(corpus), "releases": live, "parameters": parameters, "gates": gates}
        print_json(build_fields(found) | more | {"replays": [_replay_fields(replay) for replay in replays]})
        return
    table = Table(show_header=False, box=None)
    table.add_row("build", f"{found.id}: {printable(found.name)} ({found.kind}), {found.state}")
    if found.error:
        table.add_row("error", found.error)
    table.add_row("store", printable(found.path))
    table.add_row("started", f"{time_text(found.started_at)} UTC, {_seconds(found) or 'unknown'} seconds")
    if found.source_id:
        table.add_row("made from", f"build {found.source_id}")
    if corpus:
        size = f"{counted(corpus.documents, 'document')}, {counted(corpus.tokens, 'token')} of {corpus.tokenizer}"
        table.add_row("corpus", f"{printable(corpus.name)}: {size}")
    for key, value in counts(found).items():
        table.add_row(key, number_text(value))
    table.add_row("bytes", number_text(found.size_bytes))
    for key, value in sorted(parameters.items()):
        table.add_row(key, printable(str(value)))
    for step, seconds in found.timings.items():
        table.add_row(f"seconds: {step}", f"{seconds:,.2f}")
    table.add_row("live as", ", ".join(live) or "no release points at it")
    for release, verdict in gates.items():
        for sentence in Verdict(**{"refused": {}, "forced": {}, "skipped": {}, **verdict}).sentences():
            table.add_row(f"gates of {release}", printable(sentence))
    for replay in replays:
        length = f"accepted length {replay.accepted_length:.3f}, p99 {replay.lookup_p99_us:,.0f} µs"
        name = replay.recording or replay.recordings
        table.add_row("replay", f"{printable(name)}: {length} ({replay.strategy}, budget {replay.budget})")
    stdout_console().print(table)


@builds.command()
@click.argument("directory", type=STORE)
@click.option(
    "--head",
    type=click.IntRange(min=0),
    default=HEAD,
    show_default=True,
    help="For n-gram counts: number of the most common n-grams of each n that get a row with their text.",
)
@json_option
def add(directory: Path, head: int, as_json: bool) -> None:
    """Register a finished store, whatever built it, and load what SQL asks of it; a second time changes nothing.

    \b
    Examples:
      draftstore builds add stores/chat-crest
      draftstore builds add stores/chat-ngrams --head 100000
    """
    with catalogue_session() as session:
        build = catalogue.add_build(session, directory)
    if not has_statistics(build.id, build.kind):
        with count_progress("rows") as bars:
            task = bars.add_task("loading statistics", total=None, detail="")
            load_statistics(
                build.id,
                directory,
                head=head,
                progress=lambda done, total: bars.update(task, completed=done, total=total),
            )
    if as_json:
        print_json(build_fields(build))
    else:
        click.echo(f"build {build.id}: {printable(build.name)} ({build.kind}) in {printable(build.path)}")


@builds.command()
@click.argument("build", metavar="ID|DIR")
@click.option("--files", is_flag=True, help="Remove the store's directory too.")
@json_option
def drop(build: str, files: bool, as_json: bool) -> None:
    """Remove a build with its statistics and trees; one that a release points at is refused.

    \b
    Examples:
      draftstore builds drop 7
      draftstore builds drop 7 --files
    """
    with catalogue_session() as session:
        found = catalogue.find_build(session, build)
        catalogue.drop_build(session, found.id)
    directory = Path(found.path)
    removed = files and _is_still(directory, found)
    if removed:
        remove(directory)
    if as_json:
        print_json({"id": found.id, "path": found.path, "files_removed": removed})
        return
    rest = (
        "is removed"
        if removed
        else "is left alone" + (": it no longer belongs to the build" if files else "")
    )
    click.echo(f"build {found.id} is dropped; its directory {printable(directory)} {rest}")


builds.add_command(prune)


def _live(session: Session) -> dict[int, list[str]]:
    """Return the names of the releases that point at each build."""
    live: dict[int, list[str]] = {}
    for name, build_id in session.execute(select(Release.name, Release.build_id).order_by(Release.name)):
        live.setdefault(build_id, []).append(name)
    return live


def _is_still(directory: Path, build: Build) -> bool:
    """Return True if a directory still holds the store of a build."""
    try:
        return manifest_digest(directory) == build.digest
    except StoreError:
        return False


def _seconds(build: Build) -> str:
    """Return the duration of a build: the sum of its steps, else from start to end."""
    if build.timings:
        return f"{sum(build.timings.values()):,.1f}"
    if build.finished_at is None or build.finished_at == build.started_at:
        return ""
    return f"{(build.finished_at - build.started_at).total_seconds():,.1f}"


def _replay_fields(replay: Replay) -> dict[str, Any]:
    left_out = {"id", "build_id", "created_at"}
    return {
        column.name: getattr(replay, column.name)
        for column in Replay.__table__.columns
        if column.name not in left_out
    }
