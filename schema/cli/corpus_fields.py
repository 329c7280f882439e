"""Collections as fields to print: their definition, their scans and the figures of the last scan."""

import time
from typing import Any

import numpy as np

from draftstore.cli.common import progress_bars
from draftstore.cli.output import say
from draftstore.errors import CorpusError, DraftstoreError, counted
from draftstore.storage.report import passed_over_text
from draftstore.text.digests import digest_keys
from draftstore.text.scans import Scan, open_scan
from draftstore.text.wanted import removed_rows
from schema.cli.common import catalogue_session
from schema.collections import collecting
from schema.collections.live_logs import forget, live_logs
from schema.collections.models import Collection, CollectionRemoval, CollectionSource
from schema.collections.removal_files import removals_of, scan_path
from schema.collections.removing import write_removal


def fields(collection: Collection) -> dict[str, Any]:
    """Return a collection as JSON values, with the figures of its last scan."""
    found = figures(collection)
    by_source = found.pop("sources", {})
    numbers, force = {removal.key: removal.id for removal in collection.removals}, collection.in_force
    return {
        "name": collection.name,
        "tokenizer": collection.tokenizer,
        "sources": [_source_fields(row) | by_source.get(row.id, {}) for row in collection.sources],
        "removals": [
            {
                "id": removal.id,
                "rule": {key: value for key, value in removal.rule.items() if key != "containing"},
                "containing": "containing" in removal.rule,
                "documents": removal.documents,
                "restored": removal.restores is None and removal not in force,
                "restores": removal.restores and numbers.get(removal.restores, removal.restores),
                "reason": removal.reason,
                "created_at": removal.created_at,
            }
            for removal in collection.removals
        ],
        **found,
    }


def _source_fields(row: CollectionSource) -> dict[str, Any]:
    return {
        "id": row.id,
        "kind": row.kind,
        "place": row.place,
        "column": row.column_name,
        "glob": row.globs,
        "licence": row.licence,
        "retention_seconds": row.retention.total_seconds() if row.retention else None,
        "max_bytes": row.max_bytes,
        "first_out": row.first_out,
    }


def figures(collection: Collection, found: Scan | None = None) -> dict[str, Any]:
    """Return documents, active ones, bytes of their text and removed ones of the last scan, in total and by source.

    Documents are distinct texts; one that is in several sources counts for the first.
    """
    try:
        scanned = found or open_scan(scan_path(collection.name))
    except CorpusError:  # `draftstore corpus scan` reports what is wrong
        scanned = None
    if scanned is None:
        return {}
    keys, numbers, sizes = scanned.keys, scanned.column("source"), scanned.column("bytes")
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, return_index=True)[1]] = True
    wanted = first & np.isin(keys, digest_keys(collecting.wanted_of(collection, scanned, now=time.time())))
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


def rule_text(removal: dict[str, Any]) -> str:
    """Return the rule of a take-down in readable form."""
    rule = removal["rule"]
    if removal["restores"] is not None:
        return f"takes back removal {removal['restores']}"
    if removal["containing"]:
        return "those that contain some text"
    parts = [f"{key} {value}" for key, value in rule.items() if key != "before"]
    if "before" in rule:
        parts.append(f"first seen before {time.strftime('%Y-%m-%d', time.gmtime(rule['before']))}")
    return ", ".join(parts) or "by digest"


def scan_with_progress(collection: Collection) -> Scan:
    """Scan a collection under a progress bar."""
    tokenizer = collecting.open_tokenizer(collection)
    with progress_bars() as progress:
        step = progress("scanning", "files")
        return collecting.scan_collection(collection, tokenizer, on_progress=step)


def warn_of_problems(found: Scan) -> None:
    """Report on stderr which records of a scan could not be read and which links were not followed."""
    report = found.report
    if report.passed_over:
        say(passed_over_text(report.passed_over), err=True)
    if report.bad_records:
        first = f"{report.problems[0].place}: {report.problems[0].reason}"
        say(f"{counted(report.bad_records, 'bad record')}, the first one {first}", err=True)


def put_in_force(name: str, removal: CollectionRemoval, reason: str | None, scan: Scan | None) -> int | None:
    """Write a removal, or its end; return how many documents of live logs are overwritten, None without such logs."""
    with catalogue_session() as session:
        write_removal(session, name, removal, reason)
        collection = collecting.get_collection(session, name)
    if not live_logs(collection):
        return None
    try:
        return forget(collection, scan_with_progress(collection) if scan is None else scan)
    except (DraftstoreError, OSError) as error:
        raise CorpusError(f"removal {removal.id} is written, but not all live logs forgot: {error}") from None
