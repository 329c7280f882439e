"""Notices of moved releases: sent by every move, only when it is committed, and heard by whoever listens."""

import select
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session

from draftstore.storage.manifest import manifest_digest
from schema import catalogue, notices, pooling
from schema.database import migrate
from schema.errors import DatabaseAwayError
from schema.notices import LiveRelease, Notices
from tests.fakes.databases import publish, rollback, write_store
from tests.fakes.proxies import freezing_proxy, silent_port
from tests.fakes.servers import postgres_server
from tests.fakes.waiting import SECONDS


@pytest.fixture
def listening(database: str) -> Iterator[Notices]:
    with closing(Notices()) as listening:
        yield listening


def hear(listening: Notices) -> list[str]:
    """Wait for the next notices."""
    assert select.select([listening], [], [], SECONDS)[0], "nothing was heard"
    return listening.moved()


def add_builds(engine: Engine, folder: Path, number: int) -> list[int]:
    with Session(engine) as session, session.begin():
        return [
            catalogue.add_build(session, write_store(folder / str(i), corpus=None)).id for i in range(number)
        ]


def test_every_move_is_heard(listening: Notices, engine: Engine, tmp_path: Path) -> None:
    one, two = add_builds(engine, tmp_path, 2)
    for move in (
        lambda session: publish(session, "chat", one),
        lambda session: publish(session, "chat", two),
        lambda session: rollback(session, "chat"),
        lambda session: catalogue.remove(session, "chat"),
    ):
        with Session(engine) as session, session.begin():
            move(session)
        assert hear(listening) == ["chat"]
    assert listening.moved() == []


def test_only_what_is_committed_and_changes_something(
    listening: Notices, engine: Engine, tmp_path: Path
) -> None:
    (build,) = add_builds(engine, tmp_path, 1)
    with pytest.raises(RuntimeError), Session(engine) as session, session.begin():  # noqa: PT012
        publish(session, "undone", build)
        raise RuntimeError
    with Session(engine) as session, session.begin():
        publish(session, "chat", build)
        assert not select.select([listening], [], [], 0.2)[0]
    assert hear(listening) == ["chat"]
    with Session(engine) as session, session.begin():
        publish(session, "chat", build)  # as it was
    with Session(engine) as session, session.begin():
        publish(session, "last", build)
    assert hear(listening) == ["last"]


def test_live_releases(listening: Notices, engine: Engine, tmp_path: Path) -> None:
    assert listening.releases() == []
    one, two = add_builds(engine, tmp_path, 2)
    with Session(engine) as session, session.begin():
        publish(session, "code", one)
        publish(session, "chat", two)
    digests = [manifest_digest(tmp_path / name) for name in "10"]
    assert listening.releases() == [
        LiveRelease("chat", two, "rest", str(tmp_path / "1"), digests[0], []),
        LiveRelease("code", one, "rest", str(tmp_path / "0"), digests[1], []),
    ]
    assert sorted(listening.moved()) == ["chat", "code"]  # what came while something else was asked


def test_a_connection_that_is_ended_by_the_server(listening: Notices, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
            " AND pid <> pg_backend_pid() AND datname = current_database()"
        )
    assert select.select([listening], [], [], SECONDS)[0]
    with pytest.raises(DatabaseAwayError):
        listening.releases()


def test_the_server_is_away_or_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_server() as server:
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", server.url)
        migrate()
        with closing(Notices()) as listening:
            server.stop(signal.SIGQUIT)
            assert select.select([listening], [], [], SECONDS)[0]
            with pytest.raises(DatabaseAwayError):
                listening.releases()
        with pytest.raises(DatabaseAwayError, match="draftstore db status"):
            Notices()


def test_a_server_that_takes_connections_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "CONNECT_TIMEOUT", 2)
    monkeypatch.setattr("schema.database.CONNECT_TIMEOUT", 2)
    with silent_port() as port:
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", f"postgresql://u:p@127.0.0.1:{port}/d")
        with pytest.raises(DatabaseAwayError, match="timeout"):
            Notices()


def test_a_server_that_hangs_later_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres_server() as server, freezing_proxy("127.0.0.1", server.port) as proxy:
        url = make_url(server.url).set(port=proxy.port).render_as_string(hide_password=False)
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", url)
        migrate()
        with closing(Notices()) as listening:
            assert listening.releases() == []
            proxy.freeze()
            began = time.monotonic()
            with monkeypatch.context() as patch:  # a machine may take longer for answers that do come
                patch.setattr(pooling.LimitedConnection, "limit", 0.5)
                with pytest.raises(DatabaseAwayError, match=r"no answer within 0\.5 seconds"):
                    listening.releases()
            assert time.monotonic() - began >= 0.5
            proxy.thaw()
        with closing(Notices()) as listening:
            assert listening.releases() == []
