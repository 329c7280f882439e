"""The proof that removed documents are gone: builds are immutable and record the digests of their documents.

A live build from a source of the collection may hold only wanted documents. That covers what digests of removed texts
cannot: the same file read with another chat template gives other texts, none of which the collection wants.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.text.digests import digest_keys
from draftstore.text.scans import Scan
from draftstore.text.sources import GLOB_SIGNS
from draftstore.text.wanted import removed_rows
from schema.catalogue.lineage import document_digests, source_places
from schema.collections.collecting import removals_of, wanted_of
from schema.collections.models import Collection
from schema.collections.removal_files import collection_folder
from schema.models import Build, Release

AGAIN = "build it again from the collection, or publish another build"


class Checked(NamedTuple):
    """A live build compared with the documents of a collection.

    Attributes:
        build: id of the build.
        kind: its kind.
        releases: names of the releases that point at it.
        documents: number of its documents, if known.
        removed: how many of them were removed from the collection.
        unwanted: how many others the collection does not want, if the build has a source of the collection.
        problem: why the build could not be checked; None if it was.
    """

    build: int
    kind: str
    releases: list[str]
    documents: int
    removed: int
    unwanted: int
    problem: str | None = None

    @property
    def clean(self) -> bool:
        """Whether it holds only wanted documents."""
        return not self.removed and not self.unwanted and self.problem is None


def removed_keys(collection: Collection, scan: Scan) -> NDArray[np.bytes_]:
    """Return the digests of all removed documents, S16 [n], including those that rules have matched since."""
    removals = removals_of(collection)
    keys = [scan.keys[removed_rows(scan, removals)], *(digest_keys(removal.digests) for removal in removals)]
    return np.unique(np.concatenate(keys))


def check_live_builds(
    session: Session, collection: Collection, scan: Scan, removed: NDArray[np.bytes_]
) -> list[Checked]:
    """Compare the documents of live builds with those of a collection; clean builds of other sources are omitted.

    Args:
        session: open session.
        collection: the collection.
        scan: a current scan: what the builds should have been made from.
        removed: S16 [n], see `removed_keys`.
    """
    wanted = digest_keys(wanted_of(collection, scan))
    places = [*(source.place for source in collection.sources), str(collection_folder(collection.name))]
    checked = []
    for build, releases in _live_builds(session):
        row = Checked(build.id, build.kind, releases, 0, 0, 0)
        sources = source_places(build)
        ours = build.parameters.get("collection") == collection.name or _overlap(sources, places)
        try:
            digests = document_digests(session, build)
        except (DraftstoreError, OSError) as error:
            checked.append(row._replace(problem=f"{error}: {AGAIN}"))
            continue
        keys = np.unique(digest_keys(digests))
        gone = int(np.isin(keys, removed).sum())
        unwanted = int((~np.isin(keys, wanted)).sum()) - gone if ours or not sources else 0
        if ours or gone or unwanted:
            checked.append(row._replace(documents=len(keys), removed=gone, unwanted=unwanted))
    return checked


def _live_builds(session: Session) -> Iterator[tuple[Build, list[str]]]:
    """Yield the builds of all releases, and the newest n-gram counts of each name, which SQL reads."""
    live: dict[int, list[str]] = {}
    for release in session.scalars(select(Release).order_by(Release.name)):
        live.setdefault(release.build_id, []).append(release.name)
    counts = select(Build).filter_by(kind=NGRAMS, state="finished").order_by(Build.name, Build.id.desc())
    for build in session.scalars(counts.distinct(Build.name)):
        live.setdefault(build.id, [])
    for build in session.scalars(select(Build).where(Build.id.in_(live)).order_by(Build.id)):
        yield build, live[build.id]


def _overlap(sources: Iterable[str], places: Iterable[str]) -> bool:
    """Return True if one of the sources is, contains or is inside one of the places: files, folders or URLs."""
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
