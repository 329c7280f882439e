"""`draftstore releases`: names that point at builds."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from draftstore.cli.common import progress_bars, status
from draftstore.cli.options import Group
from draftstore.cli.output import Columns, json_option, print_json, print_result, print_rows, print_table, say
from schema.catalogue.builds import add_build
from schema.catalogue.gates import CHECKS, ROLLBACK_CHECKS, Candidate, RefusedError, measure, replay_rows
from schema.catalogue.publishing import Moved, verify_build
from schema.catalogue.recordings import Replayed, ReplayRule
from schema.catalogue.releases import list_releases, release_history, remove_release
from schema.cli.common import build_fields, catalogue_session, row_fields
from schema.collections import proving
from schema.models import Build


@click.group(cls=Group)
def releases() -> None:
    """Publish builds under names and roll back.

    \b
    Examples:
      draftstore releases publish chat-vicuna 7
      draftstore releases rollback chat-vicuna
    """


@releases.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the releases and the build that each points at.

    \b
    Example:
      draftstore releases list
    """
    with catalogue_session() as session:
        found = list_releases(session)
    rows = [_fields(release.name, release.build, release.moved_at) for release in found]
    tokens = {release.name: release.build.corpus and release.build.corpus.tokens for release in found}
    entries = {release.name: build_fields(release.build)["counts"].get("entries") for release in found}
    columns: Columns = {
        "release": "release",
        "build": "build",
        "kind": "kind",
        "name": "name",
        "tokens": lambda row: tokens[row["release"]],
        "entries": lambda row: entries[row["release"]],
        "bytes": "bytes",
        "moved (UTC)": "moved_at",
        "store": "path",
    }
    print_rows(rows, columns, as_json, empty="no releases: `draftstore releases publish NAME DIR` makes one")


@releases.command()
@click.argument("name")
@click.argument("build", metavar="ID|DIR")
@click.option(
    "--force",
    default="",
    metavar="CHECK[,CHECK...]",
    help=f"Publish even if these checks fail: {', '.join(CHECKS)}.",
)
@json_option
def publish(name: str, build: str, force: str, as_json: bool) -> None:
    """Point a release at a build, after verifying every byte of its store.

    A build is refused, with exit status 3, if its tokenizer, model, kind or strategy differs from the live one's, if
    its corpus or tokens are more than 20 % smaller, if more than 1 % of its records are bad, or if it holds documents
    removed from its collection or one with the same sources; --force names checks to override. Both builds replay the
    recordings of the release (`draftstore recordings`), and one that accepts fewer tokens is refused too. A directory
    that is not in the catalogue is registered first.

    \b
    Examples:
      draftstore releases publish chat-vicuna 7
      draftstore releases publish chat-vicuna stores/chat --force corpus,tokens
    """
    build_id = int(build) if build.isdecimal() else _registered(Path(build))
    try:
        moved = proving.publish(
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
@click.option(
    "--force",
    default="",
    metavar="CHECK",
    help=f"Roll back even if this check fails: {', '.join(ROLLBACK_CHECKS)}.",
)
@json_option
def rollback(name: str, force: str, as_json: bool) -> None:
    """Point a release at its previous build; repeat to go further back. A large store takes no longer.

    A build that holds documents removed from its collection or one with the same sources is refused, with exit status
    3; `--force removed` overrides that, and the next rebuild moves the release again.

    \b
    Example:
      draftstore releases rollback chat-vicuna
    """
    checks = force.split(",") if force else ()
    _print_move(proving.rollback(catalogue_session, name, force=checks), as_json)


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
        build_id = remove_release(session, name)
    fields = {"release": name, "build": build_id, "removed": True}
    print_result(fields, as_json, f"{name} is removed; it pointed at build {build_id}")


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
        moves = release_history(session, name)[::-1]
    rows = [
        row_fields(move, "id", "release", "from_build", "to_build", "lengths")
        | {"from": move.from_build, "to": move.to_build, "accepted_lengths": move.lengths}
        for move in moves
    ]
    columns: Columns = {
        "moved (UTC)": "moved_at",
        "action": "action",
        "from build": "from",
        "to build": "to",
        "accepted length": lambda row: [
            f"{recording} {length:.3f}" for recording, length in row["accepted_lengths"].items()
        ],
    }
    print_rows(rows, columns, as_json)


def _registered(directory: Path) -> int:
    with catalogue_session(make=True) as session:
        return add_build(session, directory).id


def _verify_with_bar(build: Candidate) -> list[str]:
    with progress_bars() as progress:
        return verify_build(build, progress("verifying", "bytes"))


def _measure_with_status(rule: ReplayRule, builds: Sequence[Candidate]) -> list[Replayed]:
    with status(f"replaying {rule.name}"):
        return measure(rule, builds)


def _fields(name: str, build: Build | Candidate, moved_at: datetime) -> dict[str, Any]:
    return {
        "release": name,
        "build": build.id,
        "kind": build.kind,
        "name": build.name,
        "path": build.path,
        "bytes": build.size_bytes,
        "moved_at": moved_at,
    }


def _print_move(moved: Moved, as_json: bool) -> None:
    build, before = moved.build, moved.before
    if as_json:
        checks = {how: reasons for how, reasons in moved.verdict._asdict().items() if how != "refused"}
        fields = _fields(moved.name, build, moved.moved_at) | {"before": before} | checks
        print_json(fields | {"replays": replay_rows(build, moved.live)})
        return
    _print_replays(build, moved.live)
    for sentence in moved.verdict.sentences():
        say(sentence, err=True)
    was = "" if before is None else f" (before: build {before})"
    if before == build.id:
        was = " already"
    say(f"{moved.name} points at build {build.id}{was}")


def _print_replays(new: Candidate, live: Candidate | None) -> None:
    rows = [
        (row["recording"], row["as"], row["build"], f"{row['accepted_length']:.3f}")
        for row in replay_rows(new, live)
    ]
    if rows:
        print_table(("recording", "", "build", "accepted length"), rows, err=True)
