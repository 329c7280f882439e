"""The served releases: what is served, following the catalogue, builds that cannot be opened, and an open store."""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, StoreError
from draftstore.remote.wire import DraftRequest
from draftstore.storage.locks import exclusive
from draftstore.storage.manifest import load_manifest, manifest_digest, save_manifest
from draftstore.stores.registry import open_store
from schema.catalogue.builds import add_build
from schema.catalogue.releases import LiveRelease, remove_release
from schema.db.database import URL_VARIABLE
from services.lookup import following, served
from services.lookup.following import Releases, catalogue_targets
from services.lookup.metrics import Metrics
from services.lookup.served import Served
from services.lookup.settings import LookupSettings, Target, parse_store
from tests.fakes.databases import publish, rollback

REQUEST = DraftRequest("chat", "", np.array([[5, 6, 7, 300]], np.int32), 64, 0.0, None)
AWAY = "postgresql://u:secret@127.0.0.1:1/d"  # where nobody answers
Make = Callable[..., Releases]
Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture


def copy_store(like: Path, path: Path, name: str) -> Path:
    """Write a store that differs in its digest alone."""
    shutil.copytree(like, path)
    save_manifest(path, dataclasses.replace(load_manifest(path), name=name))
    return path


def cut(path: Path) -> None:
    os.truncate(path / "trees.lmdb", 100)


class Builds:
    """Builds in the catalogue that differ in their digests alone, each in a folder of its number."""

    def __init__(self, engine: Engine, tmp_path: Path, small_crest: Path) -> None:
        self.engine = engine
        self.paths = [copy_store(small_crest, tmp_path / number, number) for number in "012"]
        with Session(engine) as session, session.begin():
            self.ids = [add_build(session, path).id for path in self.paths]
        self.digests = [manifest_digest(path) for path in self.paths]

    def change(self, function: Callable[..., object], name: str, *arguments: int) -> None:
        """Change a release in a transaction."""
        with Session(self.engine) as session, session.begin():
            function(session, name, *arguments)

    def publish(self, name: str, number: int) -> None:
        self.change(publish, name, self.ids[number])


@pytest.fixture
def builds(engine: Engine, tmp_path: Path, small_crest: Path) -> Builds:
    return Builds(engine, tmp_path, small_crest)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes releases by their settings; all are closed after the test."""
    made: list[Releases] = []

    def make(**settings: Any) -> Releases:
        made.append(Releases(LookupSettings(socket=tmp_path / "s", **settings), Metrics()))
        return made[-1]

    yield make
    for releases in made:
        releases.close()


@pytest.fixture
def clock(monkeypatch: Patch) -> SimpleNamespace:
    """Return the time as releases see it, whose `seconds` a test sets."""
    clock = SimpleNamespace(seconds=0.0, time=time.time)
    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr(following, "time", clock)
    return clock


@pytest.fixture
def copied(small_crest: Path, tmp_path: Path) -> Path:
    """Return a store that a test may change."""
    return copy_store(small_crest, tmp_path / "copied", "copied")


def serving(releases: Releases) -> dict[str, str | None]:
    """Return the digests that are served, by name, after one more look at the catalogue."""
    releases.follow()
    open_now = [releases.get(name) for name in releases.names]
    return {served.name: served.target.digest for served in open_now if isinstance(served, Served)}


def in_use(path: Path) -> bool:
    """Return True if this process has a store open."""
    with exclusive(path) as free:
        return not free


def test_publishing_rollback_and_removal(make: Make, builds: Builds) -> None:
    releases = make()
    one, two, _ = builds.digests
    builds.publish("chat", 0)
    assert serving(releases) == {"chat": one}
    before = releases.get("chat")
    builds.publish("chat", 1)
    builds.publish("code", 0)
    assert serving(releases) == {"chat": two, "code": one}
    builds.change(rollback, "chat")
    builds.change(remove_release, "code")
    assert serving(releases) == {"chat": one}
    assert releases.get("chat") is before  # which was still open


def test_the_build_before_stays_15_minutes(make: Make, builds: Builds, clock: SimpleNamespace) -> None:
    releases = make()
    for number in range(3):
        builds.publish("chat", number)
        releases.follow()
    found = []
    for clock.seconds in (30.0, 120.0, 899.0, 901.0):
        releases.follow()
        found.append([in_use(path) for path in builds.paths])
    assert found == [[True, True, True], [False, True, True], [False, True, True], [False, False, True]]
    builds.change(remove_release, "chat")
    for clock.seconds in (1000.0, 1061.0):
        releases.follow()
    assert not in_use(builds.paths[2])


def test_only_named_releases_are_served(make: Make, builds: Builds, caplog: Log) -> None:
    builds.publish("chat", 0)
    builds.publish("code", 0)
    releases = make(releases=("code", "none"))
    for _ in range(2):
        assert serving(releases).keys() == {"code"}
    assert (releases.missing, releases.unopened) == (["none"], ["none"])
    assert caplog.text.count("the catalogue has no release 'none'") == 1


def test_a_replaced_directory_is_followed(make: Make, small_crest: Path, copied: Path) -> None:
    releases = make(stores=(Target("chat", copied),))
    assert serving(releases) == {"chat": manifest_digest(copied)}
    shutil.rmtree(copied)
    copy_store(small_crest, copied, "newer")
    assert releases.get("chat").draft(REQUEST)  # what is open stays whole
    assert serving(releases) == {"chat": manifest_digest(copied)}


def test_a_database_that_is_away(make: Make, builds: Builds, monkeypatch: Patch, caplog: Log) -> None:
    releases = make()
    builds.publish("chat", 0)
    releases.follow()
    with monkeypatch.context() as patch, builds.engine.connect() as connection:
        patch.setenv(URL_VARIABLE, AWAY)
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"))
        for _ in range(3):
            assert serving(releases) == {"chat": builds.digests[0]}
        assert "draftstore db status" in str(releases.problem)
        assert caplog.text.count("what is served stays") == 1
    builds.publish("chat", 1)
    assert (serving(releases), releases.problem) == ({"chat": builds.digests[1]}, None)


def test_a_start_without_the_database(make: Make, monkeypatch: Patch) -> None:
    monkeypatch.setenv(URL_VARIABLE, AWAY)
    releases = make()
    assert serving(releases) == {}
    assert str(releases.problem_at_start()).startswith("the catalogue cannot be read: ")


def test_a_build_that_is_damaged(make: Make, builds: Builds, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr(following, "AGAIN_SECONDS", 0.0)
    releases = make()
    builds.publish("chat", 0)
    before = serving(releases)
    builds.publish("chat", 1)
    cut(builds.paths[1])
    for _ in range(3):
        assert serving(releases) == before
    assert "has 100 bytes" in releases.failures["chat"]
    assert caplog.text.count("; serving 'chat' from build " + builds.digests[0][:16] + " as before") == 1
    builds.publish("chat", 2)
    assert (serving(releases), releases.failures) == ({"chat": builds.digests[2]}, {})


def test_failures(make: Make, small_crest: Path, clock: SimpleNamespace, monkeypatch: Patch) -> None:
    """A store that cannot be opened is tried again after ten seconds."""
    fail, tried = Mock(side_effect=ZeroDivisionError("nobody thought of this")), []
    releases = make(stores=(Target("chat", small_crest),))
    with monkeypatch.context() as patch:
        patch.setattr(following, "Served", fail)
        for clock.seconds in (0.0, 9.0, 11.0):
            assert serving(releases) == {}
            tried.append(fail.call_count)
    assert (tried, releases.failures) == ([1, 1, 2], {"chat": "ZeroDivisionError: nobody thought of this"})
    clock.seconds = 22.0
    assert serving(releases).keys() == {"chat"}


def test_conditions_for_the_start(make: Make, builds: Builds, small_crest: Path, tmp_path: Path) -> None:
    def problem(**settings: object) -> str | None:
        releases = make(**settings)
        releases.follow()
        return releases.problem_at_start()

    absent, whole = Target("absent", tmp_path / "absent"), Target("whole", small_crest)
    assert str(problem()).startswith("there is nothing to serve: publish a release")
    assert problem(wait=True) is None
    assert str(problem(stores=(whole, absent))).startswith("'absent' cannot be served: ")
    assert str(problem(releases=("chat",))).startswith("the catalogue has no release 'chat'")
    builds.publish("chat", 0)
    builds.publish("code", 1)
    cut(builds.paths[1])
    assert problem() is None
    assert str(problem(releases=("code",))).startswith("'code' cannot be served: ")


def test_a_build_that_moves_in_while_files_are_opened(copied: Path, monkeypatch: Patch) -> None:
    def replaced(*arguments: Any) -> object:
        store = open_store(*arguments)
        save_manifest(copied, dataclasses.replace(load_manifest(copied), name="newer"))
        return store

    monkeypatch.setattr(served, "open_store", replaced)
    with pytest.raises(StoreError, match="now holds another store"):
        Served(Target("chat", copied))
    assert not in_use(copied)


def test_a_directory_is_served_under_its_name_or_a_given_one(tmp_path: Path) -> None:
    folder = tmp_path / "chat-1.0"
    assert parse_store(str(folder)) == Target("chat-1.0", folder)
    assert parse_store(f"chat={folder}") == Target("chat", folder)
    assert parse_store(f"{tmp_path}/a=b/store") == Target("store", tmp_path / "a=b" / "store")
    assert parse_store(f"chat={tmp_path}/a=b") == Target("chat", tmp_path / "a=b")
    assert parse_store(".").path == Path.cwd()


@pytest.mark.parametrize("argument", ["a b=/store", "/", "-a=/store", "ü=/store", f"{'x' * 256}=/store"])
def test_invalid_names_are_refused(argument: str) -> None:
    with pytest.raises(DraftstoreError, match=r"cannot be the name of a store.*--store NAME="):
        parse_store(argument)


def test_releases_are_chosen_by_name_and_read_where_they_lie() -> None:
    live = [
        LiveRelease("chat", 1, "crest", "/chat", "1" * 64, ["lmdb", "postgres"]),
        LiveRelease("code", 2, "rest", "/code", "2" * 64, []),
    ]
    chat, code = Target("chat", Path("/chat"), "1" * 64), Target("code", Path("/code"), "2" * 64)
    assert catalogue_targets(live) == [chat, code]
    assert catalogue_targets(live, ["code", "none"]) == [code]
    assert [target.backend for target in catalogue_targets(live, (), "postgres")] == ["postgres", None]
