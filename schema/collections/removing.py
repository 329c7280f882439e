"""Take-down: documents that leave a collection with the next rebuild and stay out until the removal is taken back.

The texts stay in the sources, which are not ours to change; only digests and hashes are stored here.
"""

import dataclasses
from itertools import chain
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from draftstore.errors import CorpusError
from draftstore.text.digests import digest_keys, stack_digests
from draftstore.text.fragments import Finder, Fragment
from draftstore.text.scans import Scan, digest_series, documents_of
from draftstore.text.wanted import Removal, rows_with
from schema.catalogue.builds import storable
from schema.collections.collecting import get_collection, wanted_of
from schema.collections.live_logs import live_texts
from schema.collections.models import Collection, CollectionRemoval
from schema.collections.removal_files import removed_folder, write_file

MANY = 10
"""More documents than this, and more than a tenth of the collection, count as many."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Documents to take down, wanted or not; numbers are of distinct documents."""

    removal: CollectionRemoval  # to be written
    wanted: int  # those that stores may hold now and lose with the next rebuild
    contained: int  # more that go with them: the same text under other roles, or as a beginning
    other_case: int  # more that contain the text in other case
    many: bool  # whether a rule or text takes more than ten, and more than a tenth of the collection


def select_documents(
    collection: Collection, scan: Scan, by: Removal | str, *, ignore_case: bool = False
) -> Selection:
    """Find the documents of a scan to take down; there may be none.

    `by` is a rule (an id, or source and time), or a text that the documents contain: their files are read. An id that
    is only a line number (`file#7`) makes no lasting rule, because another document may take that line. CorpusError:
    an empty text, no such source, or a file changed since the scan.
    """
    document, other_case = None, 0
    if isinstance(by, str):
        fragment = Fragment.of(by, ignore_case=ignore_case)
        found, alike = _containing(collection, scan, fragment, Fragment.of(by, ignore_case=True))
        matched, other_case = np.isin(scan.keys, digest_keys(stack_digests(found))), len(alike)
        rule: dict[str, Any] = {"containing": dataclasses.asdict(fragment)}
    else:
        document, matched = by.document, by.rows(scan)
        place = next((row.place for row in collection.sources if row.id == by.source), None)
        if by.source is not None and place is None:
            raise CorpusError(
                f"{collection.name} has no source {by.source}: `draftstore corpus show {collection.name}` lists them"
            )
        lasting = not any((document or "").startswith(f"{file.name}#") for file in scan.files)
        rule = {"document": document if lasting else None, "place": place, "before": by.before}
    rows = scan.frame.filter(np.isin(scan.keys, scan.keys[matched]))
    stored = {
        f"{name}s": b"".join(rows[name].drop_nulls().unique(maintain_order=True))
        for name in ("digest", "text", "answer")
    }
    rule = storable({key: value for key, value in rule.items() if value is not None})
    keys = digest_keys(stack_digests([stored["digests"]]))
    gone = np.unique(scan.keys[rows_with(scan, digest_series(b"".join(stored.values())))])
    going, known = len(gone), len(np.unique(scan.keys))
    # With those that repeat them: live builds may hold these after the sources.
    stored["digests"] = gone.tobytes()
    return Selection(
        CollectionRemoval(rule=rule, documents=len(keys), **stored),
        wanted=int(np.isin(keys, digest_keys(wanted_of(collection, scan))).sum()),
        contained=going - len(keys),
        other_case=other_case,
        many=document is None and going > max(MANY, known / 10),
    )


def _containing(
    collection: Collection, scan: Scan, fragment: Fragment, folded: Fragment
) -> tuple[set[bytes], set[bytes]]:
    holds, holds_folded = Finder([fragment]), Finder([folded])
    exact, alike = set[bytes](), set[bytes]()
    read = ((each.identity.document, each.text) for each in documents_of(scan, scan.digests))
    for digest, text in chain(read, live_texts(collection)):
        if holds_folded(text):
            (exact if holds(text) else alike).add(digest)
    return exact, alike - exact


def restoration_of(collection: Collection, number: int) -> CollectionRemoval:
    """Return the record, to be written, that takes back the removal with this id; CorpusError if none is in force."""
    row = next((row for row in collection.removals if row.id == number), None)
    if row is None:
        problem = f"does not exist: `draftstore corpus show {collection.name}` lists them"
    elif row.restores is not None:
        problem = "takes another one back: to exclude the documents again, remove them again"
    elif row not in collection.in_force:
        problem = "was taken back before: nothing is changed"
    else:
        return CollectionRemoval(rule={}, digests=b"", documents=row.documents, restores=row.key)
    raise CorpusError(f"removal {number} of {collection.name} {problem}")


def write_removal(
    session: Session, name: str, removal: CollectionRemoval, reason: str | None = None
) -> CollectionRemoval:
    """Store a removal, or its end, in database and file; CatalogueError if there is no such collection."""
    removal.collection_id = get_collection(session, name, lock=True).id
    removal.reason = storable(reason)
    session.add(removal)
    session.flush()
    session.refresh(removal)
    write_file(removed_folder(name), removal)
    return removal
