"""Draft trees in PostgreSQL: the same bytes as in LMDB, and all of them or none."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psycopg
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, load_manifest
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.entries import Entries, LmdbEntries, open_entries, write_lmdb
from draftstore.stores.crest.store import CrestStore
from schema import statistics, trees
from schema.catalogue.builds import CatalogueError, drop_build, list_builds
from schema.catalogue.publishing import publish
from schema.db.database import migrate
from schema.db.errors import DatabaseAwayError, DatabaseTimeoutError
from schema.trees import PostgresEntries, load_store
from tests.fakes.databases import in_both_backends
from tests.fakes.servers import PostgresServer
from tests.fakes.waiting import in_threads

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


@pytest.fixture(scope="module")
def crest(small_crest: Path, tmp_path_factory: pytest.TempPathFactory) -> Crest:
    """Return a store whose manifest says that it is in PostgreSQL, too."""
    folder = in_both_backends(small_crest, tmp_path_factory.mktemp("crest") / "store")
    return Crest(folder, list(LmdbEntries(folder / "trees.lmdb").items()))


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


def test_items_are_in_key_order(loaded: Entries, crest: Crest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(loaded.items()) == crest.items
    monkeypatch.setattr(trees, "PAGE_ROWS", len(crest.items) // 4)
    entries = open_entries(crest.path, crest.manifest, "postgres")
    items = entries.items()
    assert [next(items) for _ in range(10)] == crest.items[:10]
    assert entries.get([crest.items[0][0]]) == [crest.items[0][1]]  # between two pages
    assert list(items) == crest.items[10:]
    entries.close()


def test_the_store_is_registered_once_at_its_final_path(
    database: str, crest: Crest, engine: Engine, tmp_path: Path
) -> None:
    seen = list[tuple[int, int]]()
    for _ in range(2):
        load_store(
            crest.path, tmp_path / "final", crest.manifest, crest.source, lambda *done: seen.append(done)
        )
    with Session(engine) as session:
        (build,) = list_builds(session, kind="crest")
        assert (build.kind, build.state, build.path) == ("crest", "finished", str(tmp_path / "final"))
        assert build.backends == ["lmdb", "postgres"]
    one = seen[: len(seen) // 2]
    assert (one, seen[-1]) == (sorted(one), (2 * len(crest.items), 2 * len(crest.items)))


def test_entries_that_are_damaged_in_the_database_do_not_go_live(
    loaded: PostgresEntries, crest: Crest, engine: Engine
) -> None:
    transaction = sessionmaker(engine).begin
    force = ["bad-records"]
    assert publish(transaction, "chat", loaded.build_id, force=force).build_id == loaded.build_id
    for damage, problem in (
        ("UPDATE trees SET value = value || '.' WHERE key = :key", "SHA-256"),
        (f"DROP TABLE trees_{loaded.build_id}", "holds no trees"),
    ):
        with transaction() as session:
            session.execute(text(damage), {"key": crest.items[0][0]} if ":key" in damage else {})
        with pytest.raises(CatalogueError, match=f"does not verify: .*{problem}"):
            publish(transaction, "code", loaded.build_id, force=force)


def nothing_there(database: str) -> bool:
    """Return True if no build and no partition has come into the database."""
    with psycopg.connect(database) as connection:
        builds = connection.execute("SELECT count(*) FROM builds").fetchone()
        left = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relname ~ '^(trees|kept_ngrams)_' AND relkind = 'r'"
        ).fetchone()
    return builds == left == (0,)


def test_entries_that_differ_from_the_manifest_are_refused(
    database: str, crest: Crest, tmp_path: Path
) -> None:
    changed = [*crest.items[:-1], (crest.items[-1][0], b"changed")]
    write_lmdb(tmp_path / "changed.lmdb", changed)
    with pytest.raises(StoreError, match="the manifest says"):
        load_store(crest.path, crest.path, crest.manifest, LmdbEntries(tmp_path / "changed.lmdb"))
    assert nothing_there(database)


def test_entries_of_a_dropped_build_are_refused(
    loaded: PostgresEntries, crest: Crest, engine: Engine
) -> None:
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
def test_a_forked_process_opens_its_own_connection(loaded: Entries, crest: Crest) -> None:
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

    def die(done: int, _total: int | None, _detail: str = "") -> None:
        if done >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    load_store(crest.path, crest.path, crest.manifest, crest.source, die)


def test_a_killed_load_leaves_nothing(database: str, crest: Crest) -> None:
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=load_and_die, args=(crest, 2 * len(crest.items)))
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
    monkeypatch.setattr(statistics, "PROGRESS_ROWS", 100)

    def stop(done: int, total: int | None, _detail: str = "") -> None:
        if done >= 0.5 * (total or 0):
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


def test_slow_lookups_time_out(
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


def test_both_backends_give_equal_drafts_and_a_dropped_build_can_be_loaded_again(
    database: str, engine: Engine, small_store: Path, tmp_path: Path
) -> None:
    options = CrestOptions(name="small", max_n=3, ngrams=60, backend="both")
    out = tmp_path / "crest"
    built = build_crest(options, small_store, out)

    def require_alike() -> None:
        context = np.full((1, 3), 5, np.int32)
        with (
            closing(CrestStore.open(out, backend="lmdb")) as expected,
            closing(CrestStore.open(out, backend="postgres")) as found,
        ):
            items = list(expected.entries.items())
            assert list(found.entries.items()) == items
            for key, _ in items:
                tokens = np.frombuffer(key, ">u2")
                context[0, -len(tokens) :] = tokens
                assert found.drafter().draft(context) == expected.drafter().draft(context)

    require_alike()
    with Session(engine) as session, session.begin():
        drop_build(session, list_builds(session)[0].id)
    with pytest.raises(StoreError, match="holds no trees"):
        CrestStore.open(out, backend="postgres")
    again = build_crest(options, small_store, out)
    require_alike()
    assert again.manifest.parameters == built.manifest.parameters
