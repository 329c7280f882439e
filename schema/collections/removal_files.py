"""Removals as files beside the scan: restoring an older database does not bring documents back.

    collections/NAME/removed/20260131T120000000000-1a2b3c4d.json      its time and the start of a hash of its content

Every read of a collection (`schema.collections.collecting.get_collection`) completes each side from the other. Taking a
removal back is a record of its own, with a file of its own.
"""

import base64
import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError, EarlierVersionError, counted
from draftstore.storage.files import replacing
from draftstore.text.digests import DIGEST_BYTES, IDENTITY
from draftstore.text.fragments import Fragment
from draftstore.text.wanted import Removal
from schema.collections.models import Collection, CollectionRemoval
from schema.db.home import data_home

LOG = logging.getLogger(__name__)
MODE = 0o600


DIGESTS = ("digests", "texts", "answers")
"""Columns of digests, in base64 in a file."""


def collection_folder(name: str) -> Path:
    """Return the folder of a collection's scan, mirrors and removals."""
    return data_home() / "collections" / name


def scan_path(name: str) -> Path:
    """Return the file of a collection's scan."""
    return collection_folder(name) / "scan.parquet"


def removed_folder(name: str) -> Path:
    """Return the folder of a collection's removals."""
    return collection_folder(name) / "removed"


def complete(session: Session, collection: Collection) -> None:
    """Write the removals that only the database has to files, and those that only files have to the database.

    Raises:
        CorpusError: a file cannot be read.
        EarlierVersionError: one is of an earlier version.
    """
    folder = removed_folder(collection.name)
    files, rows = _files(folder), {key_of(row): row for row in collection.removals}
    for key in rows.keys() - files.keys():
        write_file(folder, rows[key])
    if not files.keys() - rows.keys():
        return
    # Another process may be removing documents: its row becomes visible with its commit.
    session.execute(select(Collection.id).filter_by(id=collection.id).with_for_update())
    session.refresh(collection, ["removals"])
    if missing := sorted(files.keys() - {key_of(row) for row in collection.removals}):
        LOG.warning(
            "collection %s: %s in %s and not in the database, which is older: back in force",
            collection.name, counted(len(missing), "removal"), folder,
        )  # fmt: skip
        collection.removals += [CollectionRemoval(**files[key]) for key in missing]
        session.flush()


def write_file(folder: Path, row: CollectionRemoval) -> None:
    """Write a removal to a file, readable by its owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {
        "identity": IDENTITY,
        "rule": row.rule,
        **{name: base64.b64encode(getattr(row, name)).decode() for name in DIGESTS},
        "restores": row.restores,
        "documents": row.documents,
        "reason": row.reason,
        "created_at": row.created_at.astimezone(UTC).isoformat(),
    }
    with replacing(folder / f"{key_of(row)}.json", MODE) as temporary:
        temporary.write_text(json.dumps(fields), encoding="utf-8")


def remove_files(name: str) -> None:
    """Remove the files of a collection's removals, and its scan."""
    for path in (*removed_folder(name).glob("*.*"), scan_path(name)):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return the columns of the removals in a folder, by key."""
    return {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("identity", 1) != IDENTITY:
            raise EarlierVersionError(f"the removal {path} is of an earlier version")
        fields |= {name: base64.b64decode(fields[name], validate=True) for name in DIGESTS}
        fields["created_at"] = datetime.fromisoformat(fields["created_at"])
        fits = key_of(CollectionRemoval(**fields)) == path.stem
        problem = None if fits else "its name does not fit its content"
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem = str(error)
    if problem:
        raise CorpusError(
            f"the removal {path} cannot be read ({problem}): restore it from a backup, or delete it and remove the "
            "documents again"
        )
    return fields


def key_of(row: CollectionRemoval) -> str:
    """Return the name of a removal's file without its suffix."""
    when = row.created_at.astimezone(UTC).strftime("%Y%m%dT%H%M%S%f")
    content = b"".join(getattr(row, name) for name in DIGESTS) + json.dumps(row.rule, sort_keys=True).encode()
    return f"{when}-{hashlib.sha256(content + (row.restores or '').encode()).hexdigest()[:8]}"


def in_force(collection: Collection) -> list[CollectionRemoval]:
    """Return the removals of a collection that were not taken back."""
    restored = {row.restores for row in collection.removals}
    return [row for row in collection.removals if row.restores is None and key_of(row) not in restored]


def fragments_of(collection: Collection) -> tuple[Fragment, ...]:
    """Return the texts that the removals in force refuse in any document."""
    rules = (row.rule for row in in_force(collection))
    return tuple(Fragment(**rule["containing"]) for rule in rules if "containing" in rule)


def removals_of(collection: Collection) -> list[Removal]:
    """Return the removals in force as what they take from a scan, which finds the texts that they refuse."""
    numbers = {source.place: source.id for source in collection.sources}
    return [_removal(row, numbers) for row in in_force(collection)]


def _removal(row: CollectionRemoval, numbers: Mapping[str, int]) -> Removal:
    """Return a take-down; a rule for a source that the collection lacks finds nothing."""
    digests = np.frombuffer(row.digests + row.texts, np.uint8).reshape(-1, DIGEST_BYTES)
    place, before = row.rule.get("place"), row.rule.get("before")
    source = numbers.get(place or "")
    return Removal(digests, row.rule.get("document"), source, before if source or place is None else None)
