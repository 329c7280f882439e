"""The proof that removed documents are gone: builds are immutable and record the digests of their documents.

A live build made from the collection may hold only wanted documents; any other one no removed document. What cannot be
compared is proven only if somebody vouched for it since the last removal. Commands and flows move releases with
`publish` and `rollback` of this module, so that no build with removed documents goes live unnoticed:

    publish(transaction, "chat", build_id)
"""

import os
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, counted
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.text.corpus import GLOB_SIGNS
from draftstore.text.digests import digest_keys, stack_digests
from draftstore.text.scans import Scan, open_scan
from schema.catalogue import publishing
from schema.catalogue.builds import CatalogueError
from schema.catalogue.lineage import descends_from, document_keys, source_places
from schema.catalogue.releases import names_by_build
from schema.collections.collecting import get_collection, list_collections, wanted_of
from schema.collections.live_logs import live_logs, removed_digests
from schema.collections.models import Collection
from schema.collections.removal_files import collection_folder, scan_path
from schema.models import Build


class Checked(NamedTuple):
    """A live build compared with the documents of a collection."""

    build: int
    kind: str
    releases: list[str]
    documents: int = 0
    removed: int = 0  # of these documents, from the collection
    unwanted: int = 0  # others that the collection does not want, if the build was made from it
    problem: str | None = None  # why it could not be checked
    vouched: str | None = (
        None  # when somebody vouched for one that could not be checked, since the last removal
    )

    @property
    def clean(self) -> bool:
        """Whether it holds only wanted documents."""
        return not self.removed and not self.unwanted and (self.problem is None or self.vouched is not None)


def removed_keys(collection: Collection, scan: Scan | None) -> NDArray[np.bytes_]:
    """Return the digests by which builds may have removed documents, S16 [n]: their own, of texts, of live answers."""
    return digest_keys(stack_digests(frozenset[bytes]().union(*removed_digests(collection, scan).values())))


def vouch(session: Session, collection: Collection, things: Iterable[str]) -> None:
    """Record that somebody vouches for live builds (ids) and live logs (folders); CatalogueError if one is not live."""
    now = session.scalars(select(func.clock_timestamp())).one().isoformat()
    live = {str(build.id) for build, _ in _live_builds(session)} | set(map(str, live_logs(collection)))
    for thing in things:
        found = live & {thing, os.path.abspath(thing)}  # noqa: PTH100 (links may move on purpose)
        if not found:
            raise CatalogueError(
                f"{thing} is neither the id of a live build nor a live log of {collection.name}: nothing to vouch for"
            )
        collection.vouched = collection.vouched | dict.fromkeys(found, now)


def check_live_builds(session: Session, collection: Collection, scan: Scan) -> list[Checked]:
    """Compare all live builds with a collection and its current scan."""
    wanted, removed = digest_keys(wanted_of(collection, scan)), removed_keys(collection, scan)
    checked = []
    for build, releases in _live_builds(session):
        row = Checked(build.id, build.kind, releases)
        try:
            keys = document_keys(session, build)
        except (DraftstoreError, OSError) as error:
            advice = f"build it again from the collection, publish another build, or vouch for it: `--vouch {build.id}`"
            row = row._replace(problem=f"{error}; {advice}", vouched=collection.vouched_for(build.id))
        else:
            gone = int(np.isin(keys, removed).sum())
            ours = descends_from(build, collection.name)
            others = int((~np.isin(keys, wanted)).sum()) - gone if ours else 0
            row = row._replace(documents=len(keys), removed=gone, unwanted=others)
        checked.append(row)
    return checked


def _live_builds(session: Session) -> Iterator[tuple[Build, list[str]]]:
    """Yield the builds of all releases, and the newest n-gram counts of each name, which SQL reads."""
    live = names_by_build(session)
    counts = select(func.max(Build.id)).filter_by(kind=NGRAMS, state="finished").group_by(Build.name)
    found = select(Build).where(Build.id.in_(live) | Build.id.in_(counts)).order_by(Build.id)
    for build in session.scalars(found):
        yield build, live[build.id]


def find_removed(session: Session, build: Build) -> tuple[str, str]:
    """Return which documents of a build its collection, or one that shares a source, has removed, and which others.

    Removals are compared as of the last scans. What cannot be read is returned alike, unless somebody vouched for it.
    """
    found: tuple[list[str], list[str]] = [], []
    documents = cache(partial(document_keys, session, build))  # read once, and only if something was removed
    for collection in list_collections(session):
        name, reason = collection.name, ""
        try:
            get_collection(session, name)  # is of this version, with all removals
            if not collection.in_force:
                continue
            removed = removed_keys(collection, open_scan(scan_path(name)))
            number = int(np.isin(documents(), removed).sum())
            if number:
                reason = f"{counted(number, 'document')} removed from the collection {name}"
        except (DraftstoreError, OSError) as error:
            if not collection.vouched_for(build.id):
                reason = f"it cannot be compared with what was removed from the collection {name}: {error}"
        if reason:
            found[not _concerns(collection, build)].append(reason)
    refused, warned = map("; ".join, found)
    return refused, warned


publish = partial(publishing.publish, removals=find_removed)
rollback = partial(publishing.rollback, removals=find_removed)


def _concerns(collection: Collection, build: Build) -> bool:
    """Return True if a build was made from a collection or shares a source with it."""
    places = [str(collection_folder(collection.name)), *(source.place for source in collection.sources)]
    return descends_from(build, collection.name) or _overlap(source_places(build), places)


def _overlap(sources: Iterable[str], places: Iterable[str]) -> bool:
    ends = [_end(place) for place in places]
    return any(_holds(one, other) or _holds(other, one) for one in map(_end, sources) for other in ends)


def _holds(folder: str, path: str) -> bool:
    """Return True if a path is a folder or is inside it; if one of them is relative, True if it may be."""
    if "://" in folder + path or Path(folder).is_absolute() == Path(path).is_absolute():
        return f"{path}/".startswith(f"{folder}/")
    if Path(path).is_absolute():
        return f"/{folder}/" in f"{path}/"
    parts = Path(path).parts
    return any(Path(folder, *parts[start:]).exists() for start in range(len(parts)))


def _end(place: str) -> str:
    """Return a place without links, and of a pattern only the folder before its first wildcard."""
    if "://" in place:
        return place.rstrip("/")
    if not Path(place).exists() and (sign := GLOB_SIGNS.search(place)):
        place = place[: sign.start()].rpartition("/")[0]
    if Path(place).is_absolute():
        return os.path.realpath(place)
    return "/".join(part for part in Path(os.path.normpath(place)).parts if part != "..")
