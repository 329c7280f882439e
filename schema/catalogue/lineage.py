"""The lineage of a build: the sources of its text, and the documents that it holds."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import StoreError
from draftstore.storage.files import hash_file
from draftstore.storage.manifest import load_manifest, manifest_digest
from draftstore.stores.rest.store import DOCUMENTS_FILE, read_digests
from draftstore.text.digests import DIGEST_BYTES, IDENTITY, digest_keys
from draftstore.text.tokenizing import KIND as TOKENS
from draftstore.text.tokens import open_shards
from schema.models import Build


def store_digests(path: Path) -> NDArray[np.uint8] | None:
    """Return the digests of a store's documents, uint8 [n, 16], in its order; None if it does not record them."""
    manifest = load_manifest(path)
    if manifest.kind == TOKENS:
        none = np.empty((0, DIGEST_BYTES), np.uint8)
        return np.concatenate([none, *open_shards(path).digests()])
    return read_digests(path) if DOCUMENTS_FILE in manifest.files else None


def ancestors(build: Build) -> Iterator[Build]:
    """Yield a build, the build that it was made from, and so on."""
    each: Build | None = build
    while each is not None:
        yield each
        each = each.source


def document_keys(session: Session, build: Build) -> NDArray[np.bytes_]:
    """Return the digests of the documents that a build was made from, S16 [n], sorted and unique.

    They come from the first store that records them: its own, one that it descends from, or one of the same tokens.
    StoreError if no store does, it is damaged, or it knows documents by other digests.
    """
    alike = select(Build).filter_by(corpus_id=build.corpus_id, state="finished").order_by(Build.id.desc())
    others = session.scalars(alike) if build.corpus_id is not None else ()
    for each in chain(ancestors(build), others):
        path, manifest = Path(each.path), each.manifest or {}
        files = manifest.get("files", {})
        recorded = [name for name in files if name == DOCUMENTS_FILE or name.endswith(".digests")]
        if not recorded or not path.exists():
            continue
        if manifest_digest(path) != each.digest:
            raise StoreError(f"{path} holds a different store than build {each.id}")
        if manifest["parameters"]["plan"].get("identity") != IDENTITY:
            raise StoreError(f"{path} is of an earlier version, which knew documents by other digests")
        for name in recorded:
            if hash_file(path / name) != files[name]["sha256"]:
                raise StoreError(f"{path / name} is damaged")
        if (digests := store_digests(path)) is not None:
            return np.unique(digest_keys(digests))
    made = ((each.manifest or {}).get("parameters", {}).get("source") for each in ancestors(build))
    known = [
        f": `draftstore catalogue add {place}` makes those of its REST store known" for place in made if place
    ]
    raise StoreError("its documents are not recorded" + "".join(known[-1:]))


def descends_from(build: Build, collection: str) -> bool:
    """Return True if a build was made from a collection, or from a build that was."""
    return any(each.parameters.get("collection") == collection for each in ancestors(build))


def source_places(build: Build) -> list[str]:
    """Return the files, folders and URLs that a build's text came from; none if its manifest names none."""
    return [
        place
        for each in ancestors(build)
        for place in ((each.manifest or {}).get("corpus", {}).get("sources") or [])
    ]
