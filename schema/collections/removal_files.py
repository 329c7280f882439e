"""Removals as files beside the scan: restoring an older database does not bring documents back.

    collections/NAME/removed/20260131T120000000000-1a2b3c4d.json      its time and the start of a hash of its content

Every read of a collection (`schema.collections.collecting.get_collection`) completes each side from the other. Taking a
removal back is a record of its own, with a file of its own.
"""

import base64
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError, EarlierVersionError, counted
from draftstore.storage.files import replacing
from draftstore.text.digests import IDENTITY
from draftstore.text.fragments import Fragment
from draftstore.text.wanted import Removal
from schema.collections.models import DIGESTS, Collection, CollectionRemoval
from schema.db.embedded import data_home

LOG = logging.getLogger(__name__)
MODE = 0o600


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
    """Write to files what only the database has, and the other way round; CorpusError if a file cannot be read."""
    folder = removed_folder(collection.name)
    files = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    rows = {row.key: row for row in collection.removals}
    for key in rows.keys() - files.keys():
        write_file(folder, rows[key])
    if not files.keys() - rows.keys():
        return
    # Another process may be removing documents: its row becomes visible with its commit.
    session.execute(select(Collection.id).filter_by(id=collection.id).with_for_update())
    session.refresh(collection, ["removals"])
    if missing := sorted(files.keys() - {row.key for row in collection.removals}):
        LOG.warning(
            "collection %s: %s in %s and not in the database, which is older: back in force",
            collection.name, counted(len(missing), "removal"), folder,
        )  # fmt: skip
        collection.removals += [CollectionRemoval(**files[key]) for key in missing]
        session.flush()


def write_file(folder: Path, row: CollectionRemoval) -> None:
    """Write a removal to a file, readable by its owner only."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {name: getattr(row, name) for name in ("rule", "restores", "documents", "reason")}
    fields |= {name: base64.b64encode(getattr(row, name)).decode() for name in DIGESTS}
    fields |= {"identity": IDENTITY, "created_at": row.created_at.astimezone(UTC).isoformat()}
    with replacing(folder / f"{row.key}.json", MODE) as temporary:
        temporary.write_text(json.dumps(fields), encoding="utf-8")


def remove_files(name: str) -> None:
    """Remove the files of a collection's removals, and its scan."""
    for path in (*removed_folder(name).glob("*.*"), scan_path(name)):
        path.unlink(missing_ok=True)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("identity", 1) != IDENTITY:
            raise EarlierVersionError(f"the removal {path} is of an earlier version")
        fields |= {name: base64.b64decode(fields[name], validate=True) for name in DIGESTS}
        fields["created_at"] = datetime.fromisoformat(fields["created_at"])
        if CollectionRemoval(**fields).key == path.stem:
            return fields
        problem = "its name does not fit its content"
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem = str(error)
    raise CorpusError(
        f"the removal {path} cannot be read ({problem}): restore it from a backup, or delete it and remove the "
        "documents again"
    )


def fragments_of(collection: Collection) -> tuple[Fragment, ...]:
    """Return the texts that the removals in force refuse in any document."""
    rules = (row.rule for row in collection.in_force)
    return tuple(Fragment(**rule["containing"]) for rule in rules if "containing" in rule)


def removals_of(collection: Collection) -> list[Removal]:
    """Return the removals in force as what they take from a scan; rules for sources that it lacks find nothing."""
    numbers = {None: None} | {source.place: source.id for source in collection.sources}
    return [
        Removal(
            row.digests + row.texts + row.answers,
            document=row.rule.get("document"),
            source=numbers.get(row.rule.get("place"), -1),
            before=row.rule.get("before"),
        )
        for row in collection.in_force
    ]
