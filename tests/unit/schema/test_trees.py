"""Draft trees in PostgreSQL: the same bytes as in LMDB, and all of them or none."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import psycopg
import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.errors import StoreError
from draftstore.storage.manifest import FileEntry, Manifest, load_manifest, save_manifest
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.entries import (
    Entries,
    LmdbEntries,
    entries_digest,
    key_dtype,
    open_entries,
    write_lmdb,
)
from draftstore.stores.crest.envelope import Entry, Envelope, entry_bytes
from draftstore.stores.crest.store import CrestStore
from draftstore.trees.tree import DraftTree
from schema import trees
from schema.catalogue.builds import drop_build, finish_build, list_builds, start_build
from schema.db.database import migrate
from schema.db.errors import DatabaseAwayError, DatabaseTimeoutError
from schema.statistics import loading as crest_loading
from schema.trees import PostgresEntries, load_store
from tests.fakes.servers import PostgresServer
from tests.fakes.waiting import in_threads

Connection = psycopg.Connection[Any]
Items = list[tuple[bytes, bytes]]


class Crest(NamedTuple):
    """A small CREST store: where it is, and what its LMDB file holds."""

    path: Path
    items: Items

    @property
    def manifest(self) -> Manifest:
        return load_manifest(self.path)

    @property
    def source(self) -> LmdbEntries:
        return LmdbEntries(self.path / "trees.lmdb")


def make_store(folder: Path, like: Path, vocab_size: int, entries: int = 5_000) -> Crest:
    """Write a store of random n-grams, in codes fitted to nothing."""
    random = np.random.default_rng(0)
    ngrams = {tuple(random.integers(0, 384, 1 + i % 5).tolist()) for i in range(entries)}
    packed = Envelope(b"").pack(
        [entry_bytes(Entry(tree_of(ngram), len(ngram), 2)) for ngram in sorted(ngrams)]
    )
    dtype = key_dtype(vocab_size)
    keys = [np.array(ngram, dtype).tobytes() for ngram in sorted(ngrams)]
    items = sorted(zip(keys, packed, strict=True))
    folder.mkdir()
    shutil.copytree(like / "tokenizer", folder / "tokenizer")
    (folder / "dictionary.zst").write_bytes(b"")
    write_lmdb(folder / "trees.lmdb", items)
    rows = [
        (rank, len(ngram), list(ngram), entries - rank, 2, 2, 20, 10)
        for rank, ngram in enumerate(sorted(ngrams), start=1)
    ]
    names = ["rank", "n", "tokens", "count", "distinct", "nodes", "raw_bytes", "bytes"]
    pl.DataFrame(rows, schema=names, orient="row").write_parquet(folder / "kept.parquet")
    rest = load_manifest(like)
    manifest = dataclasses.replace(
        rest,
        kind="crest",
        vocab_size=vocab_size,
        counts={**rest.counts, "entries": len(items)},
        parameters={
            "entries_version": 2,
            "backends": ["lmdb", "postgres"],
            "entries_sha256": entries_digest(items),
        },
        files={
            str(path.relative_to(folder)): FileEntry.of(path) for path in folder.rglob("*") if path.is_file()
        },
    )
    save_manifest(folder, manifest)
    return Crest(folder, items)


def tree_of(ngram: tuple[int, ...]) -> DraftTree:
    """Return a tree that tells its n-gram."""
    tokens = np.array([ngram[0], ngram[-1]], np.int32)
    return DraftTree(tokens, np.array([-1, 0], np.int16), np.array([len(ngram), 40], np.uint8))


@pytest.fixture(scope="module")
def crest(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Crest:
    return make_store(tmp_path_factory.mktemp("crest") / "store", small_store, 384)


@pytest.fixture
def loaded(database: str, crest: Crest) -> Iterator[Entries]:
    """Return the entries of the store in a database of the test's own."""
    load_store(crest.path, crest.path, crest.manifest, crest.source)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    yield entries
    entries.close()


def test_lookups(loaded: Entries, crest: Crest) -> None:
    stored, absent = dict(crest.items), [b"", b"\0", b"\xff\xff" * 5, b"\0" * 9_000]
    keys = [key for key, _ in crest.items[::7]]
    for begin in range(0, len(keys), 5):
        asked = keys[begin : begin + 5]
        assert loaded.get(asked) == [stored[key] for key in asked]
    one = stored[keys[0]]
    mixed = [absent[0], keys[0], absent[1], keys[0], *absent[2:]]
    assert loaded.get(mixed) == [None, one, None, one, None, None]
    assert loaded.get([]) == []
    assert loaded.get(absent) == [None] * len(absent)


def test_all_entries_come_in_the_order_of_keys(
    loaded: Entries, crest: Crest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(crest.items) > 2 * 1_000
    assert list(loaded.items()) == crest.items
    items = loaded.items()
    assert [next(items) for _ in range(10)] == crest.items[:10]
    assert loaded.get([crest.items[0][0]]) == [crest.items[0][1]]  # between two pages
    assert list(items) == crest.items[10:]
    monkeypatch.setattr(trees, "PAGE_ROWS", 1_000)
    again = open_entries(crest.path, crest.manifest, "postgres")
    assert entries_digest(again.items()) == crest.manifest.parameters["entries_sha256"]
    again.close()


def test_keys_of_large_vocabularies(database: str, small_store: Path, tmp_path: Path) -> None:
    wide = make_store(tmp_path / "wide", small_store, 100_000, entries=50)
    with pytest.raises(StoreError, match="--backend postgres, or set DRAFTSTORE_DATABASE_URL"):
        open_entries(wide.path, wide.manifest, "postgres")
    load_store(wide.path, wide.path, wide.manifest, wide.source)
    entries = open_entries(wide.path, wide.manifest, "postgres")
    assert list(entries.items()) == wide.items
    entries.close()


def test_the_store_is_registered_once_where_it_is_going_to_be(
    loaded: Entries, crest: Crest, engine: Engine, tmp_path: Path
) -> None:
    seen = list[tuple[int, int]]()
    load_store(crest.path, crest.path, crest.manifest, crest.source, lambda *done: seen.append(done))
    for _ in range(2):
        load_store(crest.path, tmp_path / "final", crest.manifest, crest.source)
    with Session(engine) as session:
        other, build = list_builds(session)
        assert (build.kind, build.state, build.path) == ("crest", "finished", str(crest.path))
        assert build.backends == ["lmdb", "postgres"]
        assert other.path == str(tmp_path / "final")
    assert seen == sorted(seen)
    assert seen[-1] == (2 * len(crest.items), 2 * len(crest.items))
    assert list(loaded.items()) == crest.items  # on the connection from before the second load


def test_a_build_under_way_gets_the_trees(database: str, engine: Engine, crest: Crest) -> None:
    with Session(engine) as session, session.begin():
        build_id = start_build(session, "crest", "a flow's", crest.path).id
    load_store(crest.path, crest.path, crest.manifest, crest.source)
    with pytest.raises(StoreError, match="holds no trees"):
        open_entries(crest.path, crest.manifest, "postgres")
    with Session(engine) as session, session.begin():
        finish_build(session, build_id)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    assert isinstance(entries, PostgresEntries)
    assert entries.build_id == build_id
    assert entries.get([crest.items[3][0]]) == [crest.items[3][1]]
    entries.close()


def nothing_there(database: str) -> bool:
    """Return True if no build and no partition has come into the database."""
    with psycopg.connect(database) as connection:
        builds = connection.execute("SELECT count(*) FROM builds").fetchone()
        left = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relname ~ '^(trees|kept_ngrams)_' AND relkind = 'r'"
        ).fetchone()
    return builds == left == (0,)


def test_other_entries_than_the_manifest_says(database: str, crest: Crest, tmp_path: Path) -> None:
    changed = [*crest.items[:-1], (crest.items[-1][0], b"changed")]
    write_lmdb(tmp_path / "changed.lmdb", changed)
    with pytest.raises(StoreError, match="the manifest says"):
        load_store(crest.path, crest.path, crest.manifest, LmdbEntries(tmp_path / "changed.lmdb"))
    assert nothing_there(database)


def test_a_build_that_is_dropped(loaded: PostgresEntries, crest: Crest, engine: Engine) -> None:
    items = loaded.items()
    next(items)
    with Session(engine) as session, session.begin():
        drop_build(session, loaded.build_id)
    with pytest.raises(StoreError, match="has been dropped"):
        loaded.get([crest.items[0][0]])
    with pytest.raises(StoreError, match="has been dropped"):
        list(items)


def test_threads_share_entries(loaded: Entries, crest: Crest) -> None:
    wrong = list[bytes]()

    def look_up(begin: int) -> None:
        for key, value in crest.items[begin::8]:
            if loaded.get([key, b"none"]) != [value, None]:
                wrong.append(key)

    in_threads(partial(look_up, begin) for begin in range(8))
    assert wrong == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_connects_anew(loaded: Entries, crest: Crest) -> None:
    key, value = crest.items[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if loaded.get([key]) == [value] else 1)
    found = [loaded.get([key]) for _ in range(100)]
    assert os.waitpid(child, 0)[1] == 0
    assert found == [[value]] * 100
    assert loaded.get([key]) == [value]


def load_and_die(crest: Crest, at: int) -> None:
    """Load a store, and end by SIGKILL in the midst of it."""

    def die(done: int, _total: int) -> None:
        if done >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    crest_loading.PROGRESS_ROWS = 100
    load_store(crest.path, crest.path, crest.manifest, crest.source, die)


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_killed_load_leaves_nothing(database: str, crest: Crest, share: float) -> None:
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=load_and_die, args=(crest, int(share * len(crest.items))))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert nothing_there(database)
    load_store(crest.path, crest.path, crest.manifest, crest.source)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    assert list(entries.items()) == crest.items
    entries.close()


def test_the_server_stops_during_a_load_and_is_restarted(
    own_server: PostgresServer, crest: Crest, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate()
    monkeypatch.setattr(crest_loading, "PROGRESS_ROWS", 100)

    def stop(done: int, total: int) -> None:
        if done >= 0.5 * total:
            own_server.stop()

    with pytest.raises(DatabaseAwayError, match="try again"):
        load_store(crest.path, crest.path, crest.manifest, crest.source, stop)
    own_server.start()
    assert nothing_there(own_server.url)
    load_store(crest.path, crest.path, crest.manifest, crest.source)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    assert list(entries.items()) == crest.items
    key, value = crest.items[0]
    own_server.stop(signal.SIGINT)
    for look_up in (lambda: entries.get([key]), lambda: next(entries.items())):
        with pytest.raises(DatabaseAwayError, match="draftstore db status"):
            look_up()
    own_server.start()
    assert entries.get([key]) == [value]
    own_server.stop()
    own_server.start()
    assert entries.get([key]) == [value]  # lost and found again unnoticed
    entries.close()


def test_a_lookup_that_takes_too_long_is_given_up(
    database: str, loaded: Entries, crest: Crest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schema.db.database.ANSWER_SECONDS", 1)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    with psycopg.connect(database) as connection:
        connection.execute(f"LOCK TABLE trees_{loaded.build_id}")  # type: ignore[attr-defined]
        with pytest.raises(DatabaseTimeoutError, match="statement timeout"):
            entries.get([crest.items[0][0]])
    assert entries.get([crest.items[0][0]]) == [crest.items[0][1]]
    entries.close()


@pytest.mark.parametrize("backend", ["postgres", "both"])
def test_a_real_store_in_both_backends_and_again_after_it_was_dropped(
    database: str, engine: Engine, small_store: Path, tmp_path: Path, backend: str
) -> None:
    options = CrestOptions(name="small", max_n=3, ngrams=60, backend=backend)
    out = tmp_path / "crest"
    built = build_crest(options, small_store, out)
    alone = build_crest(options.changed(backend="lmdb"), small_store, tmp_path / "alone")
    context = np.full((1, 3), 5, np.int32)

    def require_alike() -> None:
        with (
            closing(CrestStore.open(alone.path)) as expected,
            closing(CrestStore.open(out, backend="postgres")) as found,
        ):
            items = list(expected.entries.items())
            assert list(found.entries.items()) == items
            for key, _ in items:
                tokens = np.frombuffer(key, ">u2")
                context[0, -len(tokens) :] = tokens
                assert found.drafter().draft(context) == expected.drafter().draft(context)

    require_alike()
    assert (out / "trees.lmdb").exists() == (backend == "both")
    with Session(engine) as session, session.begin():
        drop_build(session, list_builds(session)[0].id)
    with pytest.raises(StoreError, match="holds no trees"):
        CrestStore.open(out, backend="postgres")
    again = build_crest(options, small_store, out)
    require_alike()
    assert again.manifest.parameters == built.manifest.parameters
