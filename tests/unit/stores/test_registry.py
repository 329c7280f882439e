import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.errors import StoreError
from draftstore.storage.manifest import load_manifest, save_manifest
from draftstore.stores.crest import kind as crest_kind
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.crest.entries import LMDB_FILE, LmdbEntries
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.registry import Store, kind_of, open_store, verify_store
from draftstore.stores.rest.store import RestStore


@pytest.fixture
def copy(small_crest: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_crest, tmp_path / "copy")
    return tmp_path / "copy"


def test_any_kind_of_store_opens(small_store: Path, small_crest: Path) -> None:
    kinds: list[tuple[Path, type[Store]]] = [(small_store, RestStore), (small_crest, CrestStore)]
    for path, kind in kinds:
        for given in (path, str(path)):
            store = open_store(given)
            assert type(store) is kind
            assert (store.path, store.manifest) == (path, load_manifest(path))
            [draft] = store.drafter("longest").draft(np.full((1, 4), -1, np.int32))
            assert len(draft.tree) == 0
            store.close()


def test_what_nothing_is_drafted_from(small_store: Path, tmp_path: Path) -> None:
    build_counts(small_store, tmp_path / "counts", CountOptions(max_n=1))
    with pytest.raises(
        StoreError, match="of kind 'ngrams', which gives no drafts: expected 'rest', 'crest', 'dresd'"
    ):
        open_store(tmp_path / "counts")
    with pytest.raises(StoreError, match="is not a store"):
        open_store(tmp_path)
    assert verify_store(tmp_path / "counts", load_manifest(tmp_path / "counts")) == []


class Elsewhere:
    """Entries in another backend: those of a file, but for the changes that a test makes."""

    def __init__(self, path: Path) -> None:
        self.held = dict(LmdbEntries(path).items())
        self.closed = False

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.held.get(key) for key in keys]

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        yield from sorted(self.held.items())

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def elsewhere(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Return the other backend of a store that says it is in both."""
    manifest = load_manifest(copy)
    parameters = {**manifest.parameters, "backends": ["lmdb", "postgres"]}
    save_manifest(copy, dataclasses.replace(manifest, parameters=parameters))
    entries = Elsewhere(copy / LMDB_FILE)

    def opened(path: Path, manifest: Any, backend: str | None = None) -> Elsewhere:
        assert (path, backend) == (copy, "postgres")
        return entries

    monkeypatch.setattr(crest_kind, "open_entries", opened)
    return entries


def test_entries_elsewhere_are_verified(copy: Path, elsewhere: Elsewhere) -> None:
    manifest = load_manifest(copy)
    assert kind_of("crest").verify_entries(copy, manifest) == verify_store(copy, manifest) == []
    assert elsewhere.closed
    whole = dict(elsewhere.held)
    key = sorted(whole)[7]
    for value in (None, b"", whole[key][:-1], whole[key] + b"\0"):
        elsewhere.held = {k: v for k, v in {**whole, key: value}.items() if v is not None}
        [problem] = verify_store(copy, manifest)
        expected = manifest.parameters["entries_sha256"]
        assert problem.startswith(f"the entries of {copy} in postgres have SHA-256 ")
        assert problem.endswith(f", expected {expected}: build it again")
    elsewhere.held = {**whole, b"\xff\xfe": b"one more"}
    assert len(verify_store(copy, manifest)) == 1


def test_a_backend_that_cannot_be_read_is_let_go(copy: Path, elsewhere: Elsewhere) -> None:
    def broken() -> Iterator[tuple[bytes, bytes]]:
        raise StoreError("the server is away")

    elsewhere.items = broken  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="away"):
        verify_store(copy, load_manifest(copy))
    assert elsewhere.closed
