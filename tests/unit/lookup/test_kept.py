"""The releases kept beside the socket: what a process serves that starts while the database is away."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.storage.manifest import manifest_digest
from schema import catalogue
from schema.database import URL_VARIABLE
from schema.live_releases import LiveRelease
from services.lookup.stores.following import Catalogue, Follower
from services.lookup.stores.kept import KeptReleases
from services.lookup.stores.targets import Target
from tests.fakes.databases import publish
from tests.fakes.proxies import silent_port
from tests.fakes.servers import free_port
from tests.fakes.waiting import SECONDS

NEVER = 3600.0
LONG_AGO = 1e9


@pytest.fixture
def kept(tmp_path: Path) -> KeptReleases:
    return KeptReleases.beside(tmp_path / "s")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "s.releases"


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody answer for the database."""
    monkeypatch.setenv(URL_VARIABLE, f"postgresql://u:secret@127.0.0.1:{free_port()}/d")


def release_of(path: Path, name: str = "chat") -> LiveRelease:
    return LiveRelease(name, 1, "rest", str(path), manifest_digest(path), [])


@contextmanager
def following(catalogue: Catalogue, *, recall: bool = False) -> Iterator[tuple[Follower, list[list[Target]]]]:
    """Follow a catalogue; yield the follower after its first look, and what it told."""
    told: list[list[Target]] = []
    follower = Follower([], catalogue, told.append, poll_seconds=NEVER, recall=recall)
    follower.start()
    try:
        assert follower.wait_for_first(SECONDS)
        yield follower, told
    finally:
        assert follower.stop(SECONDS)


def test_what_the_catalogue_says_is_kept(
    kept: KeptReleases, file: Path, engine: Engine, small_store: Path
) -> None:
    with Session(engine) as session, session.begin():
        for name in ("chat", "code"):
            publish(session, name, catalogue.add_build(session, small_store).id)
    with following(Catalogue(["chat"], kept=kept)) as (_, told):
        found = kept.load()
        assert found is not None
        assert [release.name for release in found.releases] == ["chat", "code"]  # whatever this one follows
        assert [target.name for target in told[0]] == ["chat"]
        assert file.stat().st_mode & 0o777 == 0o600
        assert list(file.parent.iterdir()) == [file]


def test_the_time_is_that_of_the_last_read(kept: KeptReleases, file: Path, small_store: Path) -> None:
    for _ in range(2):
        kept.keep([release_of(small_store)])
        os.utime(file, (LONG_AGO, LONG_AGO))
    found = kept.load()
    assert found is not None
    assert found.read_at == LONG_AGO
    written = file.stat().st_ino
    kept.keep([release_of(small_store)])
    assert file.stat().st_ino == written  # nothing has changed
    assert file.stat().st_mtime > LONG_AGO
    file.unlink()
    kept.keep([release_of(small_store)])
    assert file.exists()


@pytest.mark.usefixtures("away")
def test_without_a_database_they_are_followed(
    kept: KeptReleases, file: Path, small_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept.keep([release_of(small_store), release_of(small_store, "code")])
    os.utime(file, (LONG_AGO, LONG_AGO))
    with following(Catalogue(["chat"], kept=kept)) as (follower, told):
        assert told[0] == [Target("chat", small_store, manifest_digest(small_store))]
        assert (follower.informed, follower.complete, follower.read_at) == (True, True, LONG_AGO)
        assert follower.problem is not None
    assert "serving the releases as of 2001-09-09T01:46:40+00:00" in caplog.text


def test_a_database_that_hangs_delays_nothing(
    kept: KeptReleases, small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `recall`, a process would wait until the attempt to connect ends."""
    with silent_port() as port:
        monkeypatch.setenv(URL_VARIABLE, f"postgresql://u:p@127.0.0.1:{port}/d")
        kept.keep([release_of(small_store)])
        with following(Catalogue(kept=kept), recall=True) as (follower, told):
            assert [target.name for target in told[0]] == ["chat"]
            assert follower.informed
            assert follower.problem is None  # the attempt goes on


@pytest.mark.usefixtures("away")
def test_without_a_database_and_without_a_file_nothing_is_known(
    kept: KeptReleases, caplog: pytest.LogCaptureFixture
) -> None:
    with following(Catalogue(kept=kept), recall=True) as (follower, told):
        assert told[0] == []
        assert (follower.informed, follower.complete, follower.read_at) == (False, False, None)
    assert "and no releases are known" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"database": {}, "releases": [{"name": "x"}]}', "\x00"])
def test_a_file_that_holds_something_else_is_not_used(kept: KeptReleases, file: Path, text: str) -> None:
    file.write_text(text)
    assert kept.load() is None


def test_a_file_that_others_may_have_written_is_not_used(
    kept: KeptReleases, file: Path, small_store: Path, tmp_path: Path
) -> None:
    kept.keep([release_of(small_store)])
    assert kept.load() is not None
    file.chmod(0o620)
    assert kept.load() is None
    file.chmod(0o600)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert kept.load() is None
    if os.geteuid() == 0:
        file.unlink()
        (tmp_path / "elsewhere").rename(file)
        os.chown(file, 65_534, 65_534)
        assert kept.load() is None


def test_the_releases_of_another_database_are_not_served(
    kept: KeptReleases, file: Path, small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, "postgresql+psycopg://u:secret@one/d")
    kept.keep([release_of(small_store)])
    assert "secret" not in file.read_text()
    monkeypatch.setenv(URL_VARIABLE, "postgresql://v:other@one/d")
    assert kept.load() is not None
    for url in ("postgresql://u:secret@two/d", "postgresql://u:secret@one/e", ""):
        monkeypatch.setenv(URL_VARIABLE, url)
        assert kept.load() is None


def test_a_folder_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, small_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptReleases.beside(tmp_path / "none" / "s")
    for _ in range(3):
        kept.keep([release_of(small_store)])
    assert caplog.text.count("cannot be kept") == 1


def test_another_database_of_the_reader_is_another_database(
    kept: KeptReleases, small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.setenv("DRAFTSTORE_READER_URL", "postgresql://reader@one/d")
    kept.keep([release_of(small_store)])
    assert kept.load() is not None
    monkeypatch.setenv("DRAFTSTORE_READER_URL", "postgresql://reader@two/d")
    assert kept.load() is None


def test_a_pipe_in_its_place_keeps_nobody_waiting(kept: KeptReleases, file: Path) -> None:
    os.mkfifo(file, 0o600)
    assert kept.load() is None


@pytest.mark.parametrize("text", ["[" * 200_000, '{"database": {}, "releases": [{"name": 1}]}'])
def test_what_is_no_list_of_releases_is_not_used(kept: KeptReleases, file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o600)
    assert kept.load() is None
