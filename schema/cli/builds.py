"""`draftstore catalogue`: the builds of the catalogue."""

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import click
from sqlalchemy import select

from draftstore.cli.common import STORE, progress_bars
from draftstore.cli.options import DURATION, Group
from draftstore.cli.output import (
    Columns,
    cell,
    json_option,
    print_fields,
    print_json,
    print_result,
    print_rows,
    say,
)
from draftstore.errors import CorpusError, counted
from draftstore.storage.staging import remove_store
from draftstore.text.corpus import GLOB_SIGNS
from draftstore.text.scans import open_scan
from schema.catalogue.builds import (
    add_build,
    digest_at,
    drop_build,
    fail_cut_off,
    find_build,
    list_builds,
    storable,
)
from schema.catalogue.gates import Candidate, Verdict
from schema.catalogue.pruning import prune
from schema.catalogue.publishing import GATES, Transaction, Verify, verify_build, verify_present
from schema.catalogue.releases import list_releases, names_by_build
from schema.cli.common import build_fields, catalogue_session, row_fields
from schema.collections.collecting import list_collections
from schema.collections.models import Collection
from schema.collections.removal_files import scan_path
from schema.db.embedded import data_home
from schema.models import KINDS, STATES, Build, Corpus, Replay
from schema.statistics import HEAD, has_statistics, load_statistics

ALL = 1 << 30
"""More builds than there can be."""
CHECKS: dict[str, Verify] = {"fast": verify_present, "full": verify_build}
COLUMNS: Columns = {
    "id": "id",
    "kind": "kind",
    "name": "name",
    "state": "state",
    "entries": lambda row: row["counts"].get("entries"),
    "bytes": "bytes",
    "started (UTC)": "started_at",
    "seconds": lambda row: _seconds(row),
    "live as": "releases",
}


@click.group(cls=Group)
def builds() -> None:
    """Manage the builds in the catalogue.

    \b
    Examples:
      draftstore catalogue list --kind crest
      draftstore catalogue show 7
    """


@builds.command("list")
@click.option("--kind", type=click.Choice(KINDS), help="List only builds of this kind.")
@click.option("--state", type=click.Choice(STATES), help="List only builds in this state.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of builds."
)
@click.option(
    "--check",
    type=click.Choice([*CHECKS]),
    help="Add what is wrong or left over, with advice: of live stores (full: every byte), other builds, folders of "
    "flows, and collections. Exit with status 1 if something does not work.",
)
@json_option
def list_command(kind: str | None, state: str | None, limit: int, check: str | None, as_json: bool) -> None:
    """List builds, newest first, with the releases that point at them.

    \b
    Examples:
      draftstore catalogue list --kind crest --state finished
      draftstore catalogue list --check full
    """
    with catalogue_session() as session:
        fail_cut_off(session)
        found = list_builds(session, kind=kind, state=state, limit=limit)
        live = names_by_build(session)
    rows = [build_fields(build) | {"releases": live[build.id]} for build in found]
    findings = [*examine(catalogue_session, data_home(), CHECKS[check])] if check else []
    if check and as_json:
        print_json({"builds": rows, "findings": [finding._asdict() for finding in findings]})
    else:
        print_rows(rows, COLUMNS, as_json, empty="no builds: `draftstore catalogue add DIR` adds a store")
        for problem, what, advice in sorted(findings, key=lambda finding: not finding.problem):
            say(f"{'problem' if problem else 'note'}: {what}\n  {advice}")
    if any(finding.problem for finding in findings):
        sys.exit(1)


@builds.command()
@click.argument("build", metavar="ID|DIR")
@json_option
def show(build: str, as_json: bool) -> None:
    """Show a build: corpus, parameters, sizes, timings, releases, replays, and why it failed.

    \b
    Examples:
      draftstore catalogue show 7
      draftstore catalogue show stores/chat
    """
    with catalogue_session() as session:
        fail_cut_off(session)
        found = find_build(session, build)
        corpus = found.corpus
        live = names_by_build(session)[found.id]
        replays = session.scalars(select(Replay).filter_by(build_id=found.id).order_by(Replay.id)).all()
    parameters = dict(found.parameters)
    gates = parameters.pop(GATES, {})
    fields = build_fields(found) | {
        "corpus": corpus and row_fields(corpus, "created_at"),
        "releases": live,
        "parameters": parameters,
        "gates": gates,
        "replays": [row_fields(replay, "id", "build_id", "created_at") for replay in replays],
    }
    if as_json:
        print_json(fields)
    else:
        print_fields(_lines(fields, corpus))


def _lines(fields: dict[str, Any], corpus: Corpus | None) -> Iterator[tuple[str, Any]]:
    yield "build", f"{fields['id']}: {fields['name']} ({fields['kind']}), {fields['state']}"
    yield "error", fields["error"]
    yield "store", fields["path"]
    yield "started (UTC)", fields["started_at"]
    yield "seconds", _seconds(fields)
    yield "made from", fields["source"] and f"build {fields['source']}"
    if corpus:
        size = f"{counted(corpus.documents, 'document')}, {counted(corpus.tokens, 'token')} of {corpus.tokenizer}"
        yield "corpus", f"{corpus.name}: {size}"
    yield from fields["counts"].items()
    yield "bytes", fields["bytes"]
    yield from _flat(fields["parameters"])
    yield from ((f"seconds: {step}", f"{seconds:,.2f}") for step, seconds in fields["timings"].items())
    yield "live as", fields["releases"] or "no release points at it"
    for release, verdict in fields["gates"].items():
        for sentence in Verdict(*(verdict.get(how, {}) for how in Verdict._fields)).sentences():
            yield f"checks of {release}", sentence
    for replay in fields["replays"]:
        length = f"accepted length {replay['accepted_length']:.3f}, p99 {replay['lookup_p99_us']:,.0f} µs"
        name = replay["recording"] or replay["recordings"]
        yield "replay", f"{name}: {length} ({replay['strategy']}, budget {replay['budget']})"


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
    """Register a finished store and load its statistics; a second time changes nothing.

    \b
    Examples:
      draftstore catalogue add stores/chat-crest
      draftstore catalogue add stores/chat-ngrams --head 100000
    """
    with catalogue_session(make=True) as session:
        build = add_build(session, directory)
    if not has_statistics(build.id, build.kind):
        with progress_bars() as progress:
            load_statistics(build.id, directory, head=head, progress=progress("loading statistics", "rows"))
    text = f"build {build.id}: {build.name} ({build.kind}) in {build.path}"
    print_result(build_fields(build), as_json, text)


@builds.command()
@click.argument("build", metavar="ID|DIR")
@click.option("--files", is_flag=True, help="Remove the store's files too.")
@json_option
def drop(build: str, files: bool, as_json: bool) -> None:
    """Remove a build with its statistics and trees; one that a release points at is refused.

    \b
    Examples:
      draftstore catalogue drop 7
      draftstore catalogue drop 7 --files
    """
    with catalogue_session() as session:
        found = find_build(session, build)
        drop_build(session, found.id)
        directory = Path(found.path)
        removed = files and found.digest is not None and digest_at(directory) == found.digest
        # Before the catalogue drops the build: it stays if a process has the store open or this one is killed.
        left = [str(path) for path in remove_store(directory)] if removed else []
    rest = "is removed"
    if left:
        rest = f"keeps {counted(len(left), 'file')} that are not the store's, such as {left[0]}"
    elif not removed:
        rest = "stays" + (": it no longer belongs to the build" if files else "")
    fields = {"id": found.id, "path": found.path, "files_removed": removed, "left": left}
    print_result(fields, as_json, f"build {found.id} is dropped; its directory {directory} {rest}")


@builds.command("prune")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of finished builds of each kind and name that stay.",
)
@click.option(
    "--older-than",
    type=DURATION,
    default=timedelta(0),
    metavar="DURATION",
    help="Remove only what is older than this, such as 12h or 7d.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@json_option
def prune_command(keep: int, older_than: timedelta, dry_run: bool, as_json: bool) -> None:
    """Remove old builds of flows from $DRAFTSTORE_HOME/stores: files, tables, and leftovers of killed builds.

    These stay: the newest N builds of each kind and name, builds that a release points at or would be rolled back to,
    stores that a process has open, and unfinished builds that may be resumed. Stores elsewhere are never touched.

    \b
    Examples:
      draftstore catalogue prune --keep 3 --dry-run
      draftstore catalogue prune --keep 3 --older-than 7d
    """
    found = prune(catalogue_session, data_home(), keep, older_than=older_than, dry_run=dry_run)
    if as_json:
        removed = [removal._asdict() for removal in found.removed]
        print_json({"removed": removed, "in_use": found.in_use, "bytes": found.bytes, "dry_run": dry_run})
        return
    for removal in found.removed:
        build = f", build {removal.build_id}" if removal.build_id is not None else ""
        say(f"{removal.what}{build}: {removal.path}, {removal.bytes:,} bytes")
    for path in found.in_use:
        say(f"in use, stays: {path}", err=True)
    would = "would be removed" if dry_run else "removed"
    what = f"{counted(len(found.removed), 'folder')}, {found.bytes:,} bytes" if found.removed else "nothing"
    say(f"{would}: {what}")


def _flat(parameters: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for key, value in sorted(parameters.items()):
        if isinstance(value, dict):
            yield from _flat(value, f"{within}{key}.")
        elif text := cell(value):
            yield within + key, text


def _seconds(fields: dict[str, Any]) -> str:
    begin, end = fields["started_at"], fields["finished_at"]
    if fields["timings"]:
        return f"{sum(fields['timings'].values()):,.1f}"
    return "" if end in (None, begin) else f"{(end - begin).total_seconds():,.1f}"


class Finding(NamedTuple):
    """Something to report, and what to do; `problem`: something does not work, else it wastes space."""

    problem: bool
    what: str
    advice: str


def examine(transaction: Transaction, home: Path, verify: Verify) -> Iterator[Finding]:
    """Examine live stores with `verify`, other builds, folders in `home`, collections, and leftovers of builds."""
    with transaction() as session:  # none is open while stores are read
        live = {release.name: Candidate.of(release.build) for release in list_releases(session)}
        builds = session.execute(select(Build.id, Build.state, Build.path).order_by(Build.id)).all()
        collections = list_collections(session)
    for name, build in live.items():
        advice = f"draftstore releases rollback {name}, or releases publish {name} BUILD of another build"
        for problem in verify(build):
            yield Finding(True, f"release {name}, build {build.id}: {problem}", advice)
    released = {build.id for build in live.values()}
    for number, state, path in builds:
        if state == "finished" and number not in released and not Path(path).exists():
            what = f"build {number} is registered, but {path} is gone"
            yield Finding(False, what, f"drop it: draftstore catalogue drop {number}")
    known = {path for _, _, path in builds}
    for folder in sorted((home / "stores").resolve().glob("*/[!.]*")):
        if storable(str(folder)) not in known:
            advice = f"register it (draftstore catalogue add {folder}), or remove it"
            yield Finding(False, f"{folder} belongs to no build", advice)
    for collection in collections:
        yield from _examine_collection(collection)
    for removal in prune(transaction, home, ALL, dry_run=True).removed:
        what = f"{removal.what} {removal.path} is left over, {removal.bytes:,} bytes"
        yield Finding(False, what, "remove it: draftstore catalogue prune --keep 3")


def _examine_collection(collection: Collection) -> Iterator[Finding]:
    try:
        open_scan(scan_path(collection.name))
    except CorpusError as error:
        advice = "remove that file; one of an earlier version: docs/operations.md, Upgrade"
        yield Finding(True, f"collection {collection.name}: {error}", advice)
    for source in collection.sources:
        if source.kind == "files" and not GLOB_SIGNS.search(source.place) and not Path(source.place).exists():
            what = f"collection {collection.name}: {source.place} is missing"
            yield Finding(True, what, "restore it, or define the collection again: draftstore corpus drop")
