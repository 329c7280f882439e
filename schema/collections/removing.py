"""Take-down: documents that leave a collection with the next rebuild and do not come back.

The texts stay in the sources, which are not ours to change; only digests and hashes are stored here.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError
from draftstore.text.digests import digest_keys, stack_digests, text_digest
from draftstore.text.fragments import Fragment
from draftstore.text.scans import Scan, documents_of
from draftstore.text.wanted import Removal
from schema.catalogue.builds import storable
from schema.collections.collecting import get_collection, wanted_of
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.removal_files import removed_folder, write_file


@dataclasses.dataclass(frozen=True)
class Selection:
    """Documents to take down.

    Attributes:
        digests: uint8 [n, 16], of all distinct texts that matched, wanted or not.
        wanted: how many of them stores may hold now and lose with the next rebuild.
        rule: what is excluded from now on, as `CollectionRemoval.rule`.
    """

    digests: NDArray[np.uint8]
    wanted: int
    rule: dict[str, Any]


def select_documents(
    collection: Collection,
    scan: Scan,
    *,
    document: str | None = None,
    source: int | None = None,
    before: int | None = None,
    containing: str | None = None,
) -> Selection:
    """Find the documents of a scan to take down, by one of three criteria.

    Args:
        collection: the collection.
        scan: a scan of it with its sources.
        document: the id of a document. One that is only a line number (`file#7`) makes no lasting rule, because
            another document may take that line.
        source: number of a source; may be given with `before`.
        before: unix seconds; documents first seen before.
        containing: text that the documents contain, spelled exactly so. Their files are read.

    Raises:
        CorpusError: not exactly one criterion is given; no such document or source; a file changed since the scan.
    """
    given = [document is not None, source is not None or before is not None, containing is not None]
    if sum(given) != 1:
        raise CorpusError(
            "say what to remove: a document, or by source and time, or by a text that it contains"
        )
    if source is not None and source not in [row.id for row in collection.sources]:
        raise CorpusError(
            f"{collection.name} has no source {source}: `draftstore corpus show {collection.name}` lists them"
        )
    if containing is not None:
        fragment = Fragment.of(containing)
        rule: dict[str, Any] = {"containing": dataclasses.asdict(fragment)}
        texts = (found.text for found in documents_of(scan, scan.digests))
        digests = stack_digests(text_digest(text) for text in texts if fragment.occurs_in(text))
    else:
        removal = Removal(document=document, source=source, before=before)
        rows = np.flatnonzero(removal.rows(scan))
        if document is not None and not len(rows):
            raise CorpusError(f"no document {document!r} in the scan of {collection.name}")
        digests = scan.digests[rows]
        digests = digests[np.sort(np.unique(digest_keys(digests), return_index=True)[1])]
        place = next((row.place for row in collection.sources if row.id == source), None)
        rule = {"document": document, "place": place, "before": before}
        if document is not None and document in _positions(scan, rows):
            rule = {}
    wanted = np.isin(digest_keys(digests), digest_keys(wanted_of(collection, scan)))
    return Selection(
        digests, int(wanted.sum()), {key: value for key, value in rule.items() if value is not None}
    )


def _positions(scan: Scan, rows: NDArray[np.intp]) -> list[str]:
    """Return the ids of rows that are only the number of a line."""
    ids = scan.frame["id"].gather(rows).to_list()
    names = [scan.files[place].name for place in scan.column("file")[rows].tolist()]
    return [found for found, name in zip(ids, names, strict=True) if found.startswith(f"{name}#")]


def write_removal(
    session: Session, name: str, selection: Selection, reason: str | None = None
) -> CollectionRemoval:
    """Take documents down: they leave with the next rebuild and do not come back.

    The removal is stored in the database and in a file beside the scan.

    Args:
        session: open session.
        name: name of the collection.
        selection: the documents.
        reason: a note.

    Raises:
        CatalogueError: no such collection.
    """
    collection = get_collection(session, name, lock=True)
    row = CollectionRemoval(
        collection_id=collection.id,
        rule=storable(selection.rule),
        digests=selection.digests.tobytes(),
        documents=len(selection.digests),
        reason=storable(reason),
    )
    session.add(row)
    session.flush()
    session.refresh(row)
    write_file(removed_folder(name), row)
    return row
