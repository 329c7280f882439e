"""Following the catalogue: moves and looks, a database that goes and comes back, builds that cannot be opened."""

import asyncio
import dataclasses
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psycopg
import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError
from draftstore.remote.wire import short_hash
from draftstore.storage.manifest import load_manifest, manifest_digest, save_manifest
from schema import catalogue, pooling
from schema.database import URL_VARIABLE, migrate
from services.lookup.stores import reconciling
from services.lookup.stores.following import Catalogue, Follower
from services.lookup.stores.reconciling import Reconciler
from services.lookup.stores.served import OpenStores, ServedStore, UnknownReleaseError, open_served
from services.lookup.stores.targets import Target
from tests.fakes.databases import new_engine, publish, rollback, write_store
from tests.fakes.proxies import freezing_proxy, silent_port
from tests.fakes.servers import postgres_server
from tests.fakes.waiting import SECONDS, until

NEVER = 3600.0
CONTEXT = np.array([[5, 6, 7, 300]], np.int32)


@contextmanager
def following(follower: Follower) -> Iterator[Follower]:
    follower.start()
    try:
        yield follower
    finally:
        assert follower.stop(SECONDS)


@pytest.fixture
def open_stores() -> Iterator[OpenStores]:
    open_stores = OpenStores()
    yield open_stores
    open_stores.close()


class Copies:
    """Stores that differ in their digests alone, registered in the catalogue."""

    def __init__(self, engine: Engine, folder: Path, like: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.like = like
        self.digests: dict[int, str] = {}
        self.paths: dict[int, Path] = {}

    def add(self, *, path: Path | None = None) -> int:
        """Register a copy and return its id."""
        path = path or self.folder / f"store-{len(self.digests)}"
        shutil.rmtree(path, ignore_errors=True)
        write_copy(self.like, path, len(self.digests))
        with Session(self.engine) as session, session.begin():
            build = catalogue.add_build(session, path)
            self.digests[build.id], self.paths[build.id] = str(build.digest), path
            return build.id

    def publish(self, name: str, build_id: int) -> str:
        """Publish a build and return its digest."""
        with Session(self.engine) as session, session.begin():
            publish(session, name, build_id)
        return self.digests[build_id]

    def rollback(self, name: str) -> None:
        with Session(self.engine) as session, session.begin():
            rollback(session, name)

    def remove(self, name: str) -> None:
        with Session(self.engine) as session, session.begin():
            catalogue.remove(session, name)


def write_copy(like: Path, path: Path, number: int) -> None:
    shutil.copytree(like, path)
    manifest = load_manifest(path)
    save_manifest(path, dataclasses.replace(manifest, name=f"copy {number}"))


@pytest.fixture
def copies(engine: Engine, tmp_path: Path, small_crest: Path) -> Copies:
    return Copies(engine, tmp_path, small_crest)


def serves(open_stores: OpenStores, name: str, digest: str | None) -> Callable[[], bool]:
    """Return what tells whether a name is served from a build; None: not at all."""

    def tell() -> bool:
        try:
            return open_stores.get(name).digest == digest
        except UnknownReleaseError:
            return digest is None

    return tell


class TestReleases:
    def test_publishing_rollback_and_removal(self, open_stores: OpenStores, copies: Copies) -> None:
        one, two = copies.add(), copies.add()
        copies.publish("chat", one)
        with following(Follower([], Catalogue(), Reconciler(open_stores), poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            assert follower.complete
            assert serves(open_stores, "chat", copies.digests[one])()
            copies.publish("chat", two)
            until(serves(open_stores, "chat", copies.digests[two]), "publishing")
            copies.publish("code", one)
            until(serves(open_stores, "code", copies.digests[one]), "a new release")
            copies.rollback("chat")
            until(serves(open_stores, "chat", copies.digests[one]), "rollback")
            copies.remove("code")
            until(serves(open_stores, "code", None), "removal")
            assert open_stores.names() == ["chat"]

    def test_a_rollback_swaps_to_the_store_that_is_still_open(
        self, open_stores: OpenStores, copies: Copies
    ) -> None:
        opened: list[ServedStore] = []

        def note(target: Target) -> ServedStore:
            opened.append(open_served(target))
            return opened[-1]

        one, two, three = (copies.add() for _ in range(3))
        copies.publish("chat", one)
        reconciler = Reconciler(open_stores, open_served=note)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            for _ in range(2):
                copies.publish("chat", two)
                until(serves(open_stores, "chat", copies.digests[two]), "publishing")
                copies.rollback("chat")
                until(lambda: open_stores.get("chat") is opened[0], "rollback")
            assert len(opened) == 2
            copies.publish("chat", three)
            until(lambda: opened[1].closed, "of the stores before, one stays open")
            assert not opened[0].closed
            copies.remove("chat")
            until(lambda: all(served.closed for served in opened), "removal")

    @pytest.mark.parametrize("kept_seconds", [0.0, 0.01])
    def test_the_store_before_is_closed_in_the_end(
        self, open_stores: OpenStores, copies: Copies, kept_seconds: float
    ) -> None:
        copies.publish("chat", copies.add())
        reconciler = Reconciler(open_stores, kept_seconds=kept_seconds)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.05)) as follower:
            assert follower.wait_for_first(SECONDS)
            served = open_stores.get("chat")
            copies.publish("chat", copies.add())
            until(lambda: served.closed, "the time is over")

    def test_only_releases_that_were_asked_for(
        self, open_stores: OpenStores, copies: Copies, caplog: pytest.LogCaptureFixture
    ) -> None:
        one = copies.add()
        copies.publish("chat", one)
        copies.publish("code", one)
        follower = Follower([], Catalogue(["code", "none"]), Reconciler(open_stores), poll_seconds=0.1)
        with following(follower):
            assert follower.wait_for_first(SECONDS)
            assert open_stores.names() == ["code"]
            assert (follower.missing, follower.complete) == (["none"], False)
            copies.publish("none", one)
            until(lambda: open_stores.names() == ["code", "none"], "the release came later")
            assert follower.complete
        assert [record.message for record in caplog.records].count("the catalogue has no release 'none'") == 1

    def test_its_connection_is_ended(self, open_stores: OpenStores, copies: Copies, database: str) -> None:
        builds = [copies.add(), copies.add()]
        copies.publish("chat", builds[0])
        with following(Follower([], Catalogue(), Reconciler(open_stores), poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            for turn in range(1, 6):
                with psycopg.connect(database, autocommit=True) as connection:
                    connection.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                digest = copies.publish("chat", builds[turn % 2])
                until(serves(open_stores, "chat", digest), "after the connection was ended")


class TestTheDatabaseIsAway:
    def test_it_is_away_at_first_restarted_and_gone_for_a_while(
        self, open_stores: OpenStores, tmp_path: Path, small_crest: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with postgres_server() as server:
            monkeypatch.setenv(URL_VARIABLE, server.url)
            migrate()
            server.stop(signal.SIGINT)
            fixed = Target("fixed", small_crest)
            with following(
                Follower([fixed], Catalogue(), Reconciler(open_stores), poll_seconds=0.5)
            ) as follower:
                assert follower.wait_for_first(SECONDS)
                assert open_stores.names() == ["fixed"]
                assert not follower.complete
                assert "draftstore db status" in str(follower.problem)
                server.start()
                until(lambda: follower.complete, "the server came")
                engine = new_engine(server.url)
                copies = Copies(engine, tmp_path, small_crest)
                one, two = copies.add(), copies.add()
                copies.publish("chat", one)
                until(serves(open_stores, "chat", copies.digests[one]), "publishing")
                for number, build in ((signal.SIGQUIT, two), (signal.SIGINT, one)):
                    served = open_stores.get("chat").digest
                    server.stop(number)
                    until(lambda: follower.problem is not None, "the server is gone")
                    assert open_stores.get("chat").digest == served
                    assert open_stores.get("chat").drafter().draft(CONTEXT)
                    server.start()
                    engine.dispose()
                    digest = copies.publish("chat", build)
                    until(serves(open_stores, "chat", digest), "after a restart")
                    assert follower.problem is None
                engine.dispose()

    def test_it_takes_connections_and_says_nothing(
        self,
        open_stores: OpenStores,
        copies: Copies,
        database: str,
        small_crest: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("schema.database.CONNECT_TIMEOUT", 2)
        digest = copies.publish("chat", copies.add())
        with silent_port() as port:
            monkeypatch.setenv(URL_VARIABLE, f"postgresql://u:p@127.0.0.1:{port}/d")
            follower = Follower(
                [Target("fixed", small_crest)], Catalogue(), Reconciler(open_stores), poll_seconds=0.2
            )
            with following(follower):
                assert follower.wait_for_first(SECONDS)
                assert open_stores.names() == ["fixed"]
                assert "timeout" in str(follower.problem)
                monkeypatch.setenv(URL_VARIABLE, database)
                until(serves(open_stores, "chat", digest), "the database answers")

    def test_it_hangs_later_on(
        self, open_stores: OpenStores, copies: Copies, database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with postgres_server() as server, freezing_proxy("127.0.0.1", server.port) as proxy:
            url = make_url(server.url).set(port=proxy.port).render_as_string(hide_password=False)
            monkeypatch.setenv(URL_VARIABLE, url)
            migrate()
            engine = new_engine(server.url)
            there = Copies(engine, copies.folder, copies.like)
            one, two = there.add(), there.add()
            there.publish("chat", one)
            with following(Follower([], Catalogue(), Reconciler(open_stores), poll_seconds=0.2)) as follower:
                assert follower.wait_for_first(SECONDS)
                assert serves(open_stores, "chat", there.digests[one])()
                with monkeypatch.context() as patch:
                    patch.setattr(pooling.LimitedConnection, "limit", 0.5)
                    proxy.freeze()
                    until(lambda: follower.problem is not None, "the database hangs")
                assert open_stores.get("chat").drafter().draft(CONTEXT)
                there.publish("chat", two)
                proxy.thaw()
                until(serves(open_stores, "chat", there.digests[two]), "it answers again")
            engine.dispose()

    def test_whatever_happens_it_goes_on(self, small_crest: Path, caplog: pytest.LogCaptureFixture) -> None:
        calls: list[list[Target]] = []

        def fail(targets: list[Target]) -> None:
            calls.append(targets)
            if len(calls) < 3:
                raise ZeroDivisionError

        follower = Follower([Target("a", small_crest)], None, fail, poll_seconds=0.05)
        with following(follower):
            until(lambda: len(calls) > 3, "it goes on")
        assert len([record for record in caplog.records if "trying again" in record.message]) == 2


class TestBuildsThatCannotBeOpened:
    def test_the_old_one_stays_and_the_reason_is_told(
        self,
        open_stores: OpenStores,
        copies: Copies,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE", 0.01)
        failed: list[tuple[str, str]] = []
        reconciler = Reconciler(open_stores, failed=lambda *failure: failed.append(failure))
        one, cut, foreign, good = (copies.add() for _ in range(4))
        old = copies.publish("chat", one)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            self._publish_damaged(copies, cut, lambda path: cut_file(path / "trees.lmdb"))
            until(lambda: "chat" in reconciler.failures, "the cut file")
            assert "has 100 bytes" in reconciler.failures["chat"]
            assert serves(open_stores, "chat", old)()
            time.sleep(0.5)  # several looks
            self._publish_damaged(copies, foreign, lambda path: write_other(path, one))
            until(lambda: "another store" in reconciler.failures["chat"], "the other digest")
            assert serves(open_stores, "chat", old)()
            digest = copies.publish("chat", good)
            until(serves(open_stores, "chat", digest), "a whole build")
            until(lambda: reconciler.failures == {}, "all is well")
        assert len(failed) == 2  # the same reason is told once
        assert (
            sum("serving build " + old[:16] + " as before" in entry.message for entry in caplog.records) == 2
        )

    def _publish_damaged(self, copies: Copies, build: int, damage: Callable[[Path], None]) -> None:
        """Damage a store after it was verified."""
        path = copies.paths[build]

        def verify(_: object) -> list[str]:
            damage(path)
            return []

        with Session(copies.engine) as session, session.begin():
            publish(session, "chat", build, verify=verify)

    def test_rolling_back_forgets_the_failure(self, open_stores: OpenStores, copies: Copies) -> None:
        reconciler = Reconciler(open_stores)
        one, cut = copies.add(), copies.add()
        old = copies.publish("chat", one)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            served = open_stores.get("chat")
            self._publish_damaged(copies, cut, lambda path: cut_file(path / "trees.lmdb"))
            until(lambda: "chat" in reconciler.failures, "the cut file")
            copies.rollback("chat")
            until(lambda: reconciler.failures == {}, "rollback")
            assert open_stores.get("chat") is served
            assert served.digest == old

    def test_what_is_repaired_is_opened(
        self, open_stores: OpenStores, small_crest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE", 0.01)
        path = tmp_path / "store"
        reconciler = Reconciler(open_stores)
        with following(Follower([Target("chat", path)], None, reconciler, poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            assert "is not a store" in reconciler.failures["chat"]
            assert follower.complete
            shutil.copytree(small_crest, path)
            until(serves(open_stores, "chat", manifest_digest(small_crest)), "the store has come")

    def test_an_unexpected_error_is_a_failure_too(
        self, open_stores: OpenStores, small_crest: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: Target) -> None:
            raise ZeroDivisionError("nobody thought of this")

        reconciler = Reconciler(open_stores, open_served=fail)  # type: ignore[arg-type]
        reconciler([Target("chat", small_crest)])
        assert reconciler.failures == {"chat": "ZeroDivisionError: nobody thought of this"}
        assert any(record.exc_info for record in caplog.records)

    def test_trying_again_waits_longer_each_time(
        self, open_stores: OpenStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reconciling, "FIRST_PAUSE", NEVER)
        opened: list[Target] = []

        def fail(target: Target) -> None:
            opened.append(target)
            raise DraftstoreError("not today")

        reconciler = Reconciler(open_stores, open_served=fail)  # type: ignore[arg-type]
        for _ in range(100):
            reconciler([Target("chat", tmp_path)])
        assert len(opened) == 1
        reconciler([Target("chat", tmp_path, "another")])
        assert len(opened) == 2
        reconciler([])
        assert reconciler.failures == {}


class TestBuildsThatAreReplacedInPlace:
    def test_a_release_whose_directory_holds_a_newer_build(
        self, open_stores: OpenStores, copies: Copies
    ) -> None:
        swapped: list[str] = []
        reconciler = Reconciler(open_stores, swapped=swapped.append)
        one = copies.add()
        old = copies.publish("chat", one)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.1)) as follower:
            assert follower.wait_for_first(SECONDS)
            two = copies.add(path=copies.paths[one])
            assert serves(open_stores, "chat", old)()  # what is open stays whole
            assert open_stores.get("chat").drafter().draft(CONTEXT)
            new = copies.publish("chat", two)
            until(serves(open_stores, "chat", new), "the build in its place")
        assert new != old
        assert swapped == ["chat"]

    def test_a_directory_that_was_named(
        self, open_stores: OpenStores, small_crest: Path, tmp_path: Path
    ) -> None:
        path, newer = tmp_path / "store", tmp_path / "newer"
        write_copy(small_crest, path, 1)
        write_copy(small_crest, newer, 2)
        digest = manifest_digest(newer)
        with following(
            Follower([Target("chat", path)], None, Reconciler(open_stores), poll_seconds=0.05)
        ) as follower:
            assert follower.wait_for_first(SECONDS)
            served = open_stores.get("chat")
            path.rename(tmp_path / "retired")
            newer.rename(path)
            until(serves(open_stores, "chat", digest), "the build in its place")
            until(lambda: served.closed, "the old one is closed")


def cut_file(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def write_other(path: Path, number: int) -> None:
    other = write_store(path.with_name(f"{path.name}-other"))
    (other / "manifest.json").replace(path / "manifest.json")


def test_no_lookup_fails_or_mixes_while_releases_move(
    open_stores: OpenStores, copies: Copies, small_crest: Path
) -> None:
    builds = [copies.add() for _ in range(3)]
    known = {short_hash(digest) for digest in copies.digests.values()}
    copies.publish("chat", builds[0])
    problems: list[str] = []
    seen: set[int] = set()
    done = threading.Event()

    def borrow() -> None:
        try:
            while not done.is_set():
                served = open_stores.borrow("chat")
                drafts = [len(served.drafter().draft(CONTEXT)) for _ in range(3)]
                if drafts != [1, 1, 1] or served.closed:
                    problems.append("a closed served")
                seen.add(served.build)
                served.release()
        except DraftstoreError as error:
            problems.append(repr(error))

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        reconciler = Reconciler(open_stores, loop.call_soon_threadsafe)
        with following(Follower([], Catalogue(), reconciler, poll_seconds=0.1)) as follower:
            assert await asyncio.to_thread(follower.wait_for_first, SECONDS)
            await asyncio.sleep(0)  # the first served is put
            threads = [threading.Thread(target=borrow) for _ in range(2)]
            for thread in threads:
                thread.start()
            mover = threading.Thread(target=move)
            mover.start()
            while not done.is_set():
                served = open_stores.get("chat")
                if len(served.drafter().draft(CONTEXT)) != 1:
                    problems.append("no draft")
                seen.add(served.build)
                await asyncio.sleep(0)
            for thread in [*threads, mover]:
                await asyncio.to_thread(thread.join)

    def move() -> None:
        try:
            for build in (*builds[1:], *builds):
                digest = copies.publish("chat", build)
                until(serves(open_stores, "chat", digest), "publishing")
            copies.rollback("chat")
            until(serves(open_stores, "chat", copies.digests[builds[1]]), "rollback")
        finally:
            done.set()

    asyncio.run(serve())
    assert problems == []
    assert seen == known


def test_stopping_does_not_wait_for_the_next_look(open_stores: OpenStores, small_crest: Path) -> None:
    for _ in range(3):
        with following(
            Follower([Target("a", small_crest)], None, Reconciler(open_stores), poll_seconds=NEVER)
        ) as one:
            assert one.wait_for_first(SECONDS)
    assert Follower([], None, Reconciler(open_stores)).stop()  # never started


def test_a_directory_comes_before_a_release_of_the_same_name(
    open_stores: OpenStores, copies: Copies, small_crest: Path
) -> None:
    copies.publish("chat", copies.add())
    follower = Follower([Target("chat", small_crest)], Catalogue(), Reconciler(open_stores), poll_seconds=0.1)
    with following(follower):
        assert follower.wait_for_first(SECONDS)
        assert serves(open_stores, "chat", manifest_digest(small_crest))()


def test_logs_say_what_is_served(
    open_stores: OpenStores, small_crest: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reconciler = Reconciler(open_stores)
    reconciler([Target("chat", small_crest)])
    reconciler([])
    told = [record.message for record in caplog.records]
    assert any(
        line.startswith(f"serving 'chat' from build {manifest_digest(small_crest)[:16]}") for line in told
    )
    assert "no longer serving 'chat'" in told
