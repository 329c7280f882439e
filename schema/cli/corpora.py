"""`draftstore corpus`: collections, the named sets of sources that stores are built from."""

import time
from datetime import timedelta
from typing import Any

import click
import numpy as np

from draftstore.cli.options import Group, takes
from draftstore.cli.output import Columns, cell, json_option, print_json, print_result, print_rows, say
from draftstore.errors import CorpusError, counted
from draftstore.text.digests import digest_keys
from draftstore.text.scans import Scan, open_scan
from draftstore.text.wanted import removed_rows
from schema.cli.common import catalogue_session, confirm, row_fields
from schema.cli.removing import prove, remove, restore, scan_with_progress, warn_of_problems
from schema.collections import collecting
from schema.collections.collecting import NewSource, SourceOptions
from schema.collections.live_logs import forget
from schema.collections.models import DIGESTS, Collection
from schema.collections.removal_files import removals_of, scan_path


@click.group(cls=Group)
def corpus() -> None:
    """Manage the sources of stores; remove documents and prove that they are gone.

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
    "--live",
    "live_logs",
    multiple=True,
    metavar="DIR",
    help="Folder of a live store's log; it need not exist yet, and the collection needs the model's tokenizer. May be "
    "repeated.",
)
@click.option(
    "--tokenizer", metavar="T", help="Folder, tokenizer.json or hub name; of the collection as a whole."
)
@takes(settings=SourceOptions)
@json_option
def add(
    name: str,
    places: tuple[str, ...],
    logs: tuple[str, ...],
    live_logs: tuple[str, ...],
    tokenizer: str | None,
    settings: SourceOptions,
    as_json: bool,
) -> None:
    """Add sources to a collection, creating it if needed. Adding a place again replaces its settings.

    A place is a file or folder as for `draftstore build rest --corpus`, a folder of JSON Lines, a pattern of paths in
    quotes, or the URL of objects, such as s3://bucket/prefix. The options apply to every place given.

    \b
    Examples:
      draftstore corpus add chat data/chats --tokenizer data/model
      draftstore corpus add chat --response-log answers.jsonl --retention 90d --max-bytes 10GB
      draftstore corpus add code s3://bucket/source --licence "Apache-2.0"
    """
    if not places and not logs and not live_logs and not tokenizer:
        raise click.UsageError("name a path, a URL, a --response-log, a --live log, or a --tokenizer")
    shared = dict(settings)
    new = [NewSource(place=place, **shared) for place in places]
    new += [NewSource(place=log, log=True, **shared) for log in logs]
    new += [NewSource(place=log, live=True, **shared) for log in live_logs]
    with catalogue_session(make=True) as session:
        collection = collecting.add_sources(session, name, new, tokenizer)
    forget(collection, open_scan(scan_path(name)))
    text = f"collection {name}: {counted(len(collection.sources), 'source')}"
    if collection.tokenizer:
        text += f", tokenizer {collection.tokenizer}"
    print_result(_fields(collection), as_json, text)


@corpus.command("list")
@json_option
def list_collections(as_json: bool) -> None:
    """List the collections, with the results of their last scan.

    \b
    Example:
      draftstore corpus list
    """
    with catalogue_session() as session:
        rows = [_fields(collection) for collection in collecting.list_collections(session)]
    columns: Columns = {
        "collection": "name",
        "sources": lambda row: len(row["sources"]),
        "tokenizer": "tokenizer",
        "documents": lambda row: row.get("documents"),
        "active": lambda row: row.get("active"),
        "bytes of text": lambda row: row.get("bytes"),
        "removals": lambda row: sum(not (each["restored"] or each["restores"]) for each in row["removals"]),
    }
    print_rows(rows, columns, as_json, empty="no collections: `draftstore corpus add NAME PATH` makes one")


@corpus.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a collection: its sources and their settings, the last scan, and take-downs.

    \b
    Example:
      draftstore corpus show chat
    """
    with catalogue_session() as session:
        found = _fields(collecting.find_collection(session, name))
    if as_json:
        print_json(found)
        return
    columns: Columns = {
        "source": "id",
        "kind": "kind",
        "place": "place",
        "documents": lambda row: row.get("documents"),
        "active": lambda row: row.get("active"),
        "bytes of text": lambda row: row.get("bytes"),
        "retention": lambda row: _days(row["retention_seconds"]),
        "max bytes": lambda row: row["max_bytes"] and f"{row['max_bytes']:,}, {row['first_out']} out",
        "licence": "licence",
        **{name: name for name in ("fields", "where") if any(row[name] for row in found["sources"])},
    }
    say(f"collection {name}, tokenizer {found['tokenizer'] or 'not named'}")
    print_rows(found["sources"], columns, as_json=False)
    for row in found["removals"]:
        why = f" (reason: {row['reason']})" if row["reason"] else ""
        size = counted(row["documents"], "document")
        end = ", taken back" if row["restored"] else ""
        say(f"removal {row['id']}, {cell(row['created_at'])} UTC, {size}, {_rule_text(row)}{end}{why}")


def _days(seconds: float | None) -> str:
    return str(timedelta(seconds=seconds)).removesuffix(", 0:00:00") if seconds else ""


@corpus.command()
@click.argument("name")
@json_option
def scan(name: str, as_json: bool) -> None:
    """Scan the sources of a collection. Unchanged files are not read again.

    \b
    Example:
      draftstore corpus scan chat
    """
    with catalogue_session() as session:
        collection = collecting.get_collection(session, name)
    found = scan_with_progress(collection)
    found.require_documents(name)
    filtered = found.report.filtered
    facts = {"files": len(found.files), "files_read": found.read, "filtered": filtered}
    facts |= _figures(collection, found)
    if as_json:
        print_json(facts)
        return
    files = f"{counted(len(found.files), 'file')}, {found.read:,} read"
    left = f"; {counted(filtered, 'record')} filtered out" * bool(filtered)
    say(f"{name}: {files}; {counted(facts['documents'], 'document')}, {facts['active']:,} active{left}")
    warn_of_problems(found)


@corpus.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Delete take-downs without asking.")
@json_option
def drop(name: str, yes: bool, as_json: bool) -> None:
    """Remove the definition of a collection. Its texts, stores and releases stay; its take-downs are deleted.

    \b
    Example:
      draftstore corpus drop chat
    """
    with catalogue_session() as session:
        removals = len(collecting.find_collection(session, name).in_force)
    if removals and not yes:
        lost = f"{counted(removals, 'take-down')} of {name} would be lost, and the documents could come back"
        confirm(f"{lost}. Continue?")
    with catalogue_session() as session:
        collecting.drop_collection(session, name)
    text = f"collection {name} is dropped; its texts and stores stay"
    print_result({"name": name, "removals": removals}, as_json, text)


def _fields(collection: Collection) -> dict[str, Any]:
    found = _figures(collection)
    by_source = found.pop("sources", {})
    numbers, force = {removal.key: removal.id for removal in collection.removals}, collection.in_force
    sources = [
        row_fields(row, "collection_id", "column_name", "condition", "globs", "retention", "added_at")
        | {"column": row.column_name, "where": row.condition, "glob": row.globs}
        | {"retention_seconds": row.retention.total_seconds() if row.retention else None}
        | by_source.get(row.id, {})
        for row in collection.sources
    ]
    removals = [
        row_fields(row, "collection_id", *DIGESTS)
        | {
            "rule": {key: value for key, value in row.rule.items() if key != "containing"},
            "containing": "containing" in row.rule,
            "restored": row.restores is None and row not in force,
            "restores": row.restores and numbers.get(row.restores, row.restores),
        }
        for row in collection.removals
    ]
    named = {"name": collection.name, "tokenizer": collection.tokenizer}
    return named | {"sources": sources, "removals": removals} | found


def _figures(collection: Collection, found: Scan | None = None) -> dict[str, Any]:
    """Return the numbers of a scan, in total and by source; a text that is in several sources counts for the first."""
    try:
        scanned = found or open_scan(scan_path(collection.name))
    except CorpusError:  # `draftstore corpus scan` reports what is wrong
        scanned = None
    if scanned is None:
        return {}
    keys, numbers, sizes = scanned.keys, scanned.column("source"), scanned.column("bytes")
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, return_index=True)[1]] = True
    wanted = first & np.isin(keys, digest_keys(collecting.wanted_of(collection, scanned)))
    removed = first & removed_rows(scanned, removals_of(collection))

    def counts(rows: Any) -> dict[str, int]:
        return {
            "documents": int((first & rows).sum()),
            "active": int((wanted & rows).sum()),
            "removed": int((removed & rows).sum()),
            "bytes": int(sizes[wanted & rows].sum()),
        }

    by_source = {row.id: counts(numbers == row.id) for row in collection.sources}
    return {**counts(first), "sources": by_source}


def _rule_text(removal: dict[str, Any]) -> str:
    rule = removal["rule"]
    if removal["restores"] is not None:
        return f"takes back removal {removal['restores']}"
    if removal["containing"]:
        return "those that contain some text"
    parts = [f"{key} {value}" for key, value in rule.items() if key != "before"]
    if "before" in rule:
        parts.append(f"first seen before {time.strftime('%Y-%m-%d', time.gmtime(rule['before']))}")
    return ", ".join(parts) or "by digest"


corpus.add_command(remove)
corpus.add_command(restore)
corpus.add_command(prove)
