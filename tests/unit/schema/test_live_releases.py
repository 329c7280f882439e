"""The live releases, from a database that answers, goes away or hangs."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from draftstore.storage.manifest import manifest_digest
from schema import catalogue
from schema.catalogue.live_releases import LiveRelease, LiveReleases
from schema.db.database import migrate
from schema.db.errors import DatabaseAwayError
from tests.fakes.databases import publish, write_store
from tests.fakes.proxies import silent_port
from tests.fakes.servers import PostgresServer


@pytest.fixture
def reader(database: str) -> Iterator[LiveReleases]:
    with closing(LiveReleases()) as reader:
        yield reader


def test_live_releases(reader: LiveReleases, engine: Engine, tmp_path: Path) -> None:
    assert reader.read() == []
    stores = [write_store(tmp_path / name, corpus=None) for name in "01"]
    with Session(engine) as session, session.begin():
        one, two = (catalogue.add_build(session, store).id for store in stores)
        publish(session, "code", one)
        publish(session, "chat", two)
    digests = [manifest_digest(tmp_path / name) for name in "10"]
    assert reader.read() == [
        LiveRelease("chat", two, "rest", str(tmp_path / "1"), digests[0], []),
        LiveRelease("code", one, "rest", str(tmp_path / "0"), digests[1], []),
    ]


def test_the_server_is_away_or_stops(own_server: PostgresServer) -> None:
    migrate()
    with closing(LiveReleases()) as reader:
        own_server.stop()
        with pytest.raises(DatabaseAwayError):
            reader.read()
    with pytest.raises(DatabaseAwayError, match="draftstore db status"):
        LiveReleases()


def test_a_server_that_takes_connections_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schema.db.database.CONNECT_TIMEOUT", 2)
    with silent_port() as port:
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", f"postgresql://u:p@127.0.0.1:{port}/d")
        with pytest.raises(DatabaseAwayError, match="timeout"):
            LiveReleases()
