"""Releases move under the eyes of all collections: no build that holds removed documents goes live unnoticed.

    publish(transaction, "chat", build_id)

Commands and flows publish and roll back with these functions, not with those of `schema.catalogue`.
"""

import os
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, counted
from draftstore.text.scans import open_scan
from draftstore.text.sources import GLOB_SIGNS
from schema import catalogue
from schema.catalogue import Removed
from schema.catalogue.lineage import descends_from, document_keys, source_places
from schema.collections.collecting import find_collection, get_collection
from schema.collections.models import Collection
from schema.collections.proving import removed_keys, vouched
from schema.collections.removal_files import collection_folder, in_force, scan_path
from schema.models import Build


def find_removed(session: Session, build: Build) -> Removed:
    """Return which documents of a build were removed from collections, as of their last scans.

    A collection or build that cannot be read counts like removed documents, unless somebody vouched for the build.
    """
    documents = cache(partial(document_keys, session, build))
    refused, warned = list[str](), list[str]()

    def compare(name: str) -> str | None:
        try:
            collection = get_collection(session, name)
            if not in_force(collection):
                return None
            removed = removed_keys(collection, open_scan(scan_path(name)))
        except (DraftstoreError, OSError) as error:
            return str(error)
        try:
            number = int(np.isin(documents(), removed).sum())
        except (DraftstoreError, OSError) as error:
            unknown = f"build {build.id} cannot be compared with what was removed from the collection {name}: {error}"
            return None if vouched(collection, build.id) else unknown
        return f"{counted(number, 'document')} removed from the collection {name}" if number else None

    for name in session.scalars(select(Collection.name).order_by(Collection.name)):
        if reason := compare(name):
            (refused if _concerns(session, name, build) else warned).append(reason)
    return Removed(tuple(refused), tuple(warned))


publish = partial(catalogue.publish, removals=find_removed)
rollback = partial(catalogue.rollback, removals=find_removed)


def _concerns(session: Session, name: str, build: Build) -> bool:
    """Return True if a build was made from a collection or shares a source with it."""
    places = [source.place for source in find_collection(session, name).sources]
    return descends_from(build, name) or _overlap(
        source_places(build), [*places, str(collection_folder(name))]
    )


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
