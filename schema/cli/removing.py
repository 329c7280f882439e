"""`draftstore corpus remove` and `prove-removed`: take-down, and the proof that it was done."""

from datetime import UTC, datetime
from typing import Any

import click
from rich.table import Table

from draftstore.cli.common import (
    json_option,
    print_json,
    printable,
    status,
    stderr_console,
    stdout_console,
)
from draftstore.errors import counted
from schema import collecting
from schema.cli.common import catalogue_session
from schema.cli.corpus_scanning import scan_with_progress, warn_of_problems
from schema.collection_models import Collection
from schema.proving import Checked, Proof, builds_to_prove, prove_removed
from schema.removing import select_documents, write_removal

NOT_PROVEN = 5
"""Exit status where removed documents are still held, or it cannot be told."""
LIMITS = (
    "not looked at: the sources themselves, backups and copies of stores or of the database, logs, and what lookup "
    "services and decoders have in memory until they follow the release"
)


def _where(collection: Collection, conditions: tuple[str, ...]) -> dict[str, int]:
    """Return the source and the time that `--where` names.

    Raises:
        click.UsageError: a condition has another form.
    """
    found: dict[str, int] = {}
    for condition in conditions:
        key, _, value = condition.partition("=")
        places = {row.place: row.id for row in collection.sources}
        if key == "source" and (value.isdecimal() or value in places):
            found[key] = places[value] if value in places else int(value)
        elif key == "before":
            found[key] = _seconds(value)
        else:
            raise click.UsageError(
                f"--where {condition}: expected source=NUMBER, source=PATH or before=2026-01-31; "
                f"`draftstore corpus show {collection.name}` lists the sources"
            )
    return found


def _seconds(text: str) -> int:
    """Return the unix seconds of a date or time in ISO form, in UTC unless it names a zone.

    Raises:
        click.UsageError: it is none.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"{text!r} is not a date: expected one such as 2026-01-31") from None
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp())


@click.command()
@click.argument("name")
@click.option("--document", metavar="ID", help="The document with this id, now and later.")
@click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="source=NUMBER or source=PATH: documents of this source; before=DATE: first seen before. Given twice, both.",
)
@click.option(
    "--containing",
    metavar="TEXT",
    help="Documents that contain this text, now and later. The text itself is not kept, only hashes of it.",
)
@click.option("--reason", metavar="TEXT", help="Why, as a note for people; it is kept.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def remove(
    name: str,
    document: str | None,
    conditions: tuple[str, ...],
    containing: str | None,
    reason: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Take documents down: the next rebuild leaves them out, whatever file brings them again.

    The sources are scanned first. Files of the sources and stores of before are not changed:
    `draftstore corpus prove-removed` says what still holds the texts.

    \b
    Examples:
      draftstore corpus remove chat --document chatcmpl-5f1c
      draftstore corpus remove chat --where source=2 --where before=2026-01-31
      draftstore corpus remove chat --containing "jane@example.com" --reason "asked on 3 May"
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    where = _where(collection, conditions)
    if sum([document is not None, bool(where), containing is not None]) != 1:
        raise click.UsageError("give one of --document, --where and --containing")
    tokenizer = collecting.open_tokenizer(collection)
    scan = scan_with_progress(collection, tokenizer)
    with status("reading the documents"):
        found = select_documents(
            collection, scan, document=document, containing=containing,
            source=where.get("source"), before=where.get("before"),
        )  # fmt: skip
    told = f"{counted(len(found.digests), 'document')} found, {found.wanted:,} of them wanted until now"
    if not yes:
        click.confirm(f"{told}: remove them from {name} for good?", abort=True, err=True)
    with status("keeping hashes"), catalogue_session() as session:
        removal = write_removal(session, name, scan, found, tokenizer, reason)
    if as_json:
        print_json(
            {
                "removal": removal.id,
                "documents": len(found.digests),
                "wanted": found.wanted,
                "later": bool(found.rule),
                "provable": tokenizer is not None,
            }
        )
        return
    click.echo(f"removal {removal.id}: {told}; they go with the next rebuild")
    warn_of_problems(scan)
    if tokenizer is None:
        stderr_console().print(
            f"{printable(name)} names no tokenizer, so prove-removed can compare digests only: "
            f"`draftstore corpus add {printable(name)} --tokenizer T` for the next removal"
        )


@click.command("prove-removed")
@click.argument("name")
@click.option(
    "--release",
    "releases",
    multiple=True,
    metavar="R",
    help="Look at the build of this release. May be repeated. [default: those named like the collection or its builds]",
)
@click.option("--old", is_flag=True, help="Look at builds of the same names that are no longer live, too.")
@json_option
def prove(name: str, releases: tuple[str, ...], old: bool, as_json: bool) -> None:
    """Show that no live store holds what was removed: no n-gram of 4 to 8 tokens that no wanted document has.

    Tokens of REST and DReSD stores, token shards, n-gram tables, keys and paths of CREST trees are read whole, in
    files, LMDB and PostgreSQL; digests of documents are compared. Run it after the rebuild. If something is found, or
    cannot be compared, the exit status is 5.

    \b
    Examples:
      draftstore corpus prove-removed chat
      draftstore corpus prove-removed chat --release chat-vicuna --old
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
        builds = builds_to_prove(session, name, releases, old=old)
    tokenizer = collecting.open_tokenizer(collection)
    scan = scan_with_progress(collection, tokenizer)
    with stderr_console().status("reading") as shown:
        proof = prove_removed(collection, scan, tokenizer, builds.builds, shown.update)
    if as_json:
        print_json(
            {
                "proven": proof.holds,
                "documents": proof.documents,
                "shingles": proof.shingles,
                "removals_without_hashes": proof.without,
                "builds_left_out": builds.left_out,
                "checked": [_checked(row, builds.live) for row in proof.checked],
                "not_looked_at": LIMITS.partition(": ")[2],
            }
        )
    else:
        _show(name, proof, builds.live, builds.left_out)
    if not proof.holds:
        raise click.exceptions.Exit(NOT_PROVEN)


def _checked(row: Checked, live: dict[int, list[str]]) -> dict[str, Any]:
    """Return one place of a proof as JSON values."""
    build = {"build": row.build.id, "kind": row.build.kind, "releases": live.get(row.build.id, [])}
    return build | {key: value for key, value in row._asdict().items() if key != "build"}


def _show(name: str, proof: Proof, live: dict[int, list[str]], left_out: int) -> None:
    """Print a proof for people."""
    table = Table("build", "kind", "live as", "place", "read", "shared with wanted", "of removed only")
    for row in proof.checked:
        table.add_row(
            str(row.build.id),
            row.build.kind,
            ", ".join(live.get(row.build.id, [])),
            printable(row.place),
            f"{row.tokens:,}",
            f"{row.shared:,}",
            printable(row.problem) if row.problem else f"{row.found:,}",
        )
    stdout_console().print(table)
    sought = f"{counted(proof.documents, 'removed document')}, {proof.shingles:,} hashes of their n-grams"
    if proof.holds:
        click.echo(
            f"proven for {name}: {sought}, and no build above holds one that wanted documents do not have"
        )
    else:
        click.echo(f"NOT proven for {name}: {sought}; rebuild and publish, then drop what is old", err=True)
    if proof.without:
        numbers = ", ".join(map(str, proof.without))
        click.echo(f"removals without hashes, compared by digest only: {numbers}", err=True)
    if left_out:
        click.echo(f"{counted(left_out, 'older build')} left out: --old looks at them, too", err=True)
    click.echo(LIMITS, err=True)
