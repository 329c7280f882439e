"""Releases move under the eyes of all collections: no build that holds removed documents goes live unnoticed.

    publish(transaction, "chat", build_id)

Commands and flows publish and roll back with these functions, not with those of `schema.catalogue`.
"""

import os
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, counted
from draftstore.text.corpus import GLOB_SIGNS
from draftstore.text.scans import open_scan
from schema import catalogue
from schema.catalogue.lineage import descends_from, document_keys, source_places
from schema.collections.collecting import get_collection, list_collections
from schema.collections.models import Collection
from schema.collections.proving import removed_keys
from schema.collections.removal_files import collection_folder, scan_path
from schema.models import Build


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


publish = partial(catalogue.publish, removals=find_removed)
rollback = partial(catalogue.rollback, removals=find_removed)


def _concerns(collection: Collection, build: Build) -> bool:
    """Return True if a build was made from a collection or shares a source with it."""
    places = [str(collection_folder(collection.name)), *(source.place for source in collection.sources)]
    return descends_from(build, collection.name) or _overlap(source_places(build), places)


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
