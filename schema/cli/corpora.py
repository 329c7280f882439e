"""`draftstore corpus`: collections, the named sets of sources that stores are built from."""

from typing import Any

import click
from rich.table import Column, Table

from draftstore.cli.common import json_option, print_json, printable, stdout_console
from draftstore.cli.crest import ByteSize
from draftstore.errors import counted
from schema import collecting
from schema.cli.common import catalogue_session, number_text, time_text
from schema.cli.corpus_fields import fields, figures, rule_text
from schema.cli.corpus_scanning import scan_with_progress, warn_of_problems
from schema.cli.pruning import Duration
from schema.cli.removing import prove, remove
from schema.collecting import NewSource
from schema.collection_models import FIRST_OUT


@click.group()
def corpus() -> None:
    """Name the sources of stores, see what is in them, take documents down, prove that they are gone.

    \b
    Examples:
      draftstore corpus add chat data/chats.jsonl --response-log answers.jsonl --tokenizer data/model
      draftstore corpus show chat
      draftstore corpus remove chat --containing "jane@example.com"
    """


@corpus.command()
@click.argument("name")
@click.argument("places", metavar="[PATH|URL]...", nargs=-1)
@click.option(
    "--response-log",
    "logs",
    multiple=True,
    metavar="FILE",
    help="Response log of a worker, with its rotated files; it need not exist yet. May be repeated.",
)
@click.option(
    "--tokenizer", metavar="T", help="Folder, tokenizer.json or hub name; of the collection as a whole."
)
@click.option("--column", default="text", show_default=True, help="Key or column of the text in records.")
@click.option(
    "--glob",
    "globs",
    multiple=True,
    metavar="G",
    help="Which files of a folder are read, such as '*.md'. May be repeated.",
)
@click.option("--licence", metavar="TEXT", help="What the licence allows, as a note for people.")
@click.option(
    "--retention",
    type=Duration(),
    metavar="DURATION",
    help="Documents leave with the first rebuild after they were first seen so long ago, such as 90d.",
)
@click.option("--max-bytes", type=ByteSize(), metavar="SIZE", help="Most text of each source, such as 10GB.")
@click.option(
    "--first-out",
    type=click.Choice(FIRST_OUT),
    default="oldest",
    show_default=True,
    help="Which documents go first above --max-bytes.",
)
@json_option
def add(
    name: str,
    places: tuple[str, ...],
    logs: tuple[str, ...],
    tokenizer: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Add sources to a collection, which is made if it is new. A known place takes the new settings.

    A place is a file or folder as for `draftstore build rest --corpus`, a pattern of paths in quotes, or the URL of
    objects, such as s3://bucket/prefix. The options hold for every place that the command names.

    \b
    Examples:
      draftstore corpus add chat data/chats --glob '*.jsonl' --tokenizer data/model
      draftstore corpus add chat --response-log answers.jsonl --retention 90d --max-bytes 10GB
      draftstore corpus add code s3://bucket/source --licence "Apache-2.0"
    """
    if not places and not logs and not tokenizer:
        raise click.UsageError("name a path, a URL, a --response-log, or a --tokenizer")
    new = [NewSource(place, **settings) for place in places]
    new += [NewSource(log, log=True, **settings) for log in logs]
    with catalogue_session() as session:
        collection = collecting.add_sources(session, name, new, tokenizer)
    if as_json:
        print_json(fields(collection))
    else:
        click.echo(f"collection {name}: {counted(len(collection.sources), 'source')}")


@corpus.command("list")
@json_option
def list_collections(as_json: bool) -> None:
    """List the collections, with what their last scan found.

    \b
    Example:
      draftstore corpus list
    """
    with catalogue_session() as session:
        rows = collecting.list_collections(session)
    if as_json:
        print_json([fields(row) for row in rows])
        return
    table = Table("collection", "sources", "tokenizer", "documents", "wanted", "bytes of text", "removals")
    for row in rows:
        found = figures(row)
        table.add_row(
            row.name,
            str(len(row.sources)),
            printable(row.tokenizer or ""),
            *(number_text(found.get(key)) for key in ("documents", "wanted", "bytes")),
            str(len(row.removals)),
        )
    stdout_console().print(table if rows else "no collections: `draftstore corpus add NAME PATH` makes one")


@corpus.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a collection: its sources and their settings, what the last scan found, what was taken down.

    \b
    Example:
      draftstore corpus show chat
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    if as_json:
        print_json(fields(collection))
        return
    by_source = figures(collection).get("sources", {})
    table = Table(
        "source",
        "kind",
        Column("place", overflow="fold"),
        "documents",
        "wanted",
        "bytes of text",
        "retention",
        "most bytes",
        "licence",
    )
    for row in collection.sources:
        found = by_source.get(row.id, {})
        table.add_row(
            str(row.id),
            row.kind,
            printable(row.place),
            *(number_text(found.get(key)) for key in ("documents", "wanted", "bytes")),
            str(row.retention or "").removesuffix(", 0:00:00"),
            f"{row.max_bytes:,}, {row.first_out} out" if row.max_bytes else "",
            printable(row.licence or ""),
        )
    console = stdout_console()
    console.print(f"collection {name}, tokenizer {printable(collection.tokenizer or 'not named')}")
    console.print(table)
    for removal in collection.removals:
        why = f": {printable(removal.reason)}" if removal.reason else ""
        size = counted(removal.documents, "document")
        console.print(
            f"removal {removal.id}, {time_text(removal.created_at)} UTC, {size}, {rule_text(removal.rule)}{why}"
        )


@corpus.command()
@click.argument("name")
@json_option
def scan(name: str, as_json: bool) -> None:
    """See what is in the sources of a collection. Files that did not change are not read again.

    \b
    Example:
      draftstore corpus scan chat
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    found = scan_with_progress(collection, collecting.open_tokenizer(collection))
    facts = {"files": len(found.files), "files_read": found.read, **figures(collection, found)}
    if as_json:
        print_json(facts)
        return
    files = f"{counted(len(found.files), 'file')}, {found.read:,} read"
    click.echo(f"{name}: {files}; {counted(facts['documents'], 'document')}, {facts['wanted']:,} wanted")
    warn_of_problems(found)


@corpus.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask before take-downs are forgotten.")
@json_option
def drop(name: str, yes: bool, as_json: bool) -> None:
    """Remove the definition of a collection. Its texts, stores and releases stay; its take-downs are forgotten.

    \b
    Example:
      draftstore corpus drop chat
    """
    with catalogue_session() as session:
        removals = len(collecting.get_collection(session, name).removals)
    if removals and not yes:
        lost = f"{counted(removals, 'take-down')} of {name} would be forgotten, and the documents could come back"
        click.confirm(f"{lost}. Go on?", abort=True, err=True)
    with catalogue_session() as session:
        collecting.drop_collection(session, name)
    if as_json:
        print_json({"name": name, "removals": removals})
    else:
        click.echo(f"collection {name} is dropped; its texts and stores stay")


corpus.add_command(remove)
corpus.add_command(prove)
