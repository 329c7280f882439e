"""Kinds of stores: each is described by its own module, named by one entry of the registry."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from draftstore.errors import StoreError
from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest import store as crest_store
from draftstore.stores.crest.counts import CountOptions, build_counts
from draftstore.stores.crest.entries import LMDB_FILE, LmdbEntries
from draftstore.stores.registry import open_store, verify_store


def test_the_registry_imports_no_kind_before_it_is_asked_for() -> None:
    code = "import sys, draftstore.stores.registry as r; print(set(sys.modules) & set(r.KINDS.values()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


@pytest.mark.parametrize("fixture", ["small_store", "small_crest", "small_dense"])
def test_any_kind_of_store_opens_and_drafts_of_its_samples(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(fixture)
    with closing(open_store(str(path))) as store:
        assert (store.path, store.manifest) == (path, load_manifest(path))
        contexts, hidden = store.samples(20)
        assert len(contexts) == 20
        drafts = store.drafter().draft(contexts, hidden=hidden)
        assert sum(len(draft.tree) > 0 for draft in drafts) > 10
        assert verify_store(path, store.manifest) == []


def test_stores_without_drafts_are_refused(small_store: Path, tmp_path: Path) -> None:
    build_counts(small_store, tmp_path / "counts", CountOptions(max_n=1))
    with pytest.raises(
        StoreError, match="of kind 'ngrams', which gives no drafts: expected 'rest', 'crest', 'dresd'"
    ):
        open_store(tmp_path / "counts")
    assert verify_store(tmp_path / "counts", load_manifest(tmp_path / "counts")) == []
    with pytest.raises(StoreError, match="of kind 'rest', which has no backends: omit it"):
        open_store(small_store, "lmdb")


class OtherBackend:
    """Entries in another backend."""

    def __init__(self, held: dict[bytes, bytes]) -> None:
        self.held = held
        self.closed = 0

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        if not self.held:
            raise StoreError("the server is away")
        yield from sorted(self.held.items())

    def close(self) -> None:
        self.closed += 1


def test_entries_in_another_backend_are_verified(
    small_crest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(small_crest, tmp_path / "copy"))
    manifest = load_manifest(store)
    manifest.parameters["backends"] = ["lmdb", "postgres"]
    whole = dict(LmdbEntries(store / LMDB_FILE).items())
    other = OtherBackend(whole)
    monkeypatch.setattr(crest_store, "open_entries", lambda *_: other)
    assert verify_store(store, manifest) == []
    key = sorted(whole)[7]
    for changed in ({**whole, key: whole[key] + b"\0"}, {**whole, b"\xff\xfe": b"one more"}):
        other.held = changed
        [problem] = verify_store(store, manifest)
        expected = manifest.parameters["entries_sha256"]
        assert problem.startswith(f"the entries of {store} in postgres have SHA-256 ")
        assert problem.endswith(f", expected {expected}: build it again")
    other.held = {}
    with pytest.raises(StoreError, match="away"):
        verify_store(store, manifest)
    assert other.closed == 4
    (store / LMDB_FILE).write_bytes(bytes((store / LMDB_FILE).stat().st_size))
    [problem] = verify_store(store, manifest)  # files first
    assert f"{LMDB_FILE} has SHA-256" in problem
