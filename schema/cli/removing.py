"""`draftstore corpus remove` and `prove-removed`: take-down, and the proof that it was done."""

from datetime import UTC, datetime

import click

from draftstore.cli.common import json_option, print_json, printable, status, stderr_console
from draftstore.errors import counted
from schema import collecting
from schema.cli.common import catalogue_session
from schema.cli.corpus_scanning import scan_with_progress, warn_of_problems
from schema.collection_models import Collection
from schema.removing import select_documents, write_removal


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
