"""The lineage of a build: the sources of its text, and the documents that it holds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import StoreError
from draftstore.storage.files import hash_file
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.rest.store import DOCUMENTS_FILE, read_digests
from draftstore.stores.rest.store import KIND as REST
from draftstore.text.digests import DIGEST_BYTES
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokens import open_shards
from schema.models import Build


def store_digests(path: Path) -> NDArray[np.uint8] | None:
    """Return the digests of a store's documents, uint8 [n, 16], in its order; None if it does not record them.

    Raises:
        StoreError: there is no store, or it is damaged.
    """
    manifest = load_manifest(path)
    if manifest.kind == TOKENS:
        none = np.empty((0, DIGEST_BYTES), np.uint8)
        return np.concatenate([none, *open_shards(path).digests()])
    return read_digests(path, manifest)


def ancestors(build: Build) -> Iterator[Build]:
    """Yield a build, the build that it was made from, and so on."""
    each: Build | None = build
    while each is not None:
        yield each
        each = each.source


def document_digests(session: Session, build: Build) -> NDArray[np.uint8]:
    """Return the digests of the documents that a build was made from, uint8 [n, 16].

    They come from the REST store or token shards that the build is or descends from, or that hold the same tokens;
    raise StoreError if there are none, or they are damaged.
    """
    origin = next((each for each in ancestors(build) if each.kind in (REST, TOKENS)), None)
    if origin is None and build.corpus_id is not None:
        alike = select(Build).filter_by(corpus_id=build.corpus_id, state="finished")
        alike = alike.where(Build.kind.in_((REST, TOKENS))).order_by(Build.id.desc())
        origin = next((each for each in session.scalars(alike) if Path(each.path).exists()), None)
    if origin is None or (digests := store_digests(path := Path(origin.path))) is None:
        raise StoreError("its documents are not recorded")
    if manifest_digest(path) != origin.digest:
        raise StoreError(f"{path} holds a different store than build {origin.id}")
    entry = load_manifest(path).files.get(DOCUMENTS_FILE)
    if entry is not None and hash_file(path / DOCUMENTS_FILE) != entry.sha256:
        raise StoreError(f"{path / DOCUMENTS_FILE} is damaged")
    return digests


def source_places(build: Build) -> list[str]:
    """Return the files, folders and URLs that a build's text came from; none if its manifest names none."""
    return [
        place
        for each in ancestors(build)
        for place in ((each.manifest or {}).get("corpus", {}).get("sources") or [])
    ]
