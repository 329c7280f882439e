"""The database that everything uses: which one, how failures read, whose tables are accepted, `draftstore db`."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from alembic.script import ScriptDirectory
from click.testing import CliRunner

from draftstore.cli import cli
from draftstore.errors import DraftstoreError
from schema.catalogue.releases import LiveReleases
from schema.db import database, embedded
from schema.db.access import may_change
from schema.db.database import (
    REVISION,
    alembic_config,
    connect,
    database_revision,
    database_url,
    make_engine,
    migrate,
)
from schema.db.embedded import data_home, find_cluster, find_programs
from schema.db.errors import (
    DatabaseAwayError,
    DatabaseError,
    DatabaseTimeoutError,
    database_errors,
    translate,
)
from tests.fakes.servers import PostgresServer, free_port, reachable_folder
from tests.fakes.waiting import until
from tests.unit.schema.test_sql import as_json, refuse, run

SECRET = "s3cret/with@signs"
QUOTED = "s3cret%2Fwith%40signs"
READING = (
    "catalogue list", "catalogue show 1", "catalogue drop 1", "catalogue prune --keep 3", "corpus list",
    "corpus show chat", "corpus scan chat", "corpus remove chat --document a", "corpus restore chat 1",
    "corpus prove-removed chat", "corpus drop chat", "recordings list", "recordings remove x",
    "releases list", "releases history x", "releases publish x 1", "releases rollback x", "releases remove x",
    "sql SELECT",
)  # fmt: skip
"""The commands that create no database; most only read it."""
COUNT = sqlalchemy.text("SELECT count(*) FROM builds")
VARIABLE = "DRAFTSTORE_DATABASE_URL"


@pytest.fixture
def named(own_server: PostgresServer) -> str:
    """Name a server with a password, with no tables in its database."""
    return own_server.url


@pytest.fixture(scope="module")
def cluster_folder() -> Iterator[Path]:
    """Return a data folder, whose embedded server the tests of this module use one after the other."""
    with reachable_folder() as folder:
        yield folder
        embedded.stop(folder)


@pytest.fixture
def home(cluster_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have the embedded server be the database: it is down, and has no tables."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("DRAFTSTORE_HOME", str(cluster_folder))
    monkeypatch.setattr(database, "_current", set())
    with psycopg.connect(embedded.join(cluster_folder).url) as connection:
        connection.execute(
            "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO public"
        )
    embedded.leave()
    yield cluster_folder
    embedded.leave()
    embedded.stop(cluster_folder)


@pytest.fixture
def more_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that adds a revision to a copy of the migrations, as the next version would."""
    copy = tmp_path / "migrations"
    shutil.copytree(database.MIGRATIONS, copy)
    monkeypatch.setattr(database, "MIGRATIONS", copy)

    def add() -> None:
        (copy / "versions" / "9999_more.py").write_text(
            f'"""More."""\nrevision = "9999"\ndown_revision = "{REVISION}"\n'
            "from alembic import op\n\n\n"
            'def upgrade():\n    op.execute("CREATE TABLE more (one int)")\n'
        )
        monkeypatch.setattr(database, "REVISION", "9999")
        database._current.clear()

    return add


# Which database


def test_a_named_url_is_used_with_or_without_the_name_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        monkeypatch.setenv(VARIABLE, f"{scheme}://me:{QUOTED}@db:5433/x?sslmode=require")
        assert database_url() == f"postgresql://me:{QUOTED}@db:5433/x?sslmode=require"


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://me:{QUOTED}@db/x",
        f"postgresql://me:{SECRET}%zz@db/x",
        f"postgresql://me:{QUOTED}@db:port/x",
        f"host=db password={SECRET}",
    ],
)
def test_invalid_urls_are_refused_without_quoting_them(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, reading in ((VARIABLE, False), ("DRAFTSTORE_READER_URL", True)):
        monkeypatch.setenv(variable, url)
        with pytest.raises(DatabaseError, match=f"{variable} is not .* postgresql://USER:PASS") as caught:
            connect(reading=reading)
        assert "s3cret" not in str(caught.value)


def test_the_data_folder_is_in_the_users_home_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAFTSTORE_HOME", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert data_home() == Path("/var/lib/draftstore")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert data_home() == Path("/home/me/.local/share/draftstore")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert data_home() == Path("/data/draftstore")
    monkeypatch.setenv("DRAFTSTORE_HOME", "~/stores")
    assert data_home() == Path("/home/me/stores")
    monkeypatch.setenv("DRAFTSTORE_HOME", __file__)
    with pytest.raises(DraftstoreError, match="is not a folder"):
        data_home()


# The embedded database


def test_the_embedded_database_gets_tables_and_reader_automatically(home: Path) -> None:
    connect().close()
    with connect(reading=True) as connection:
        assert connection.info.user == "draftstore_reader"
        assert may_change(connection, "draftstore_reader") is False
        assert may_change(connection, "draftstore") is True
        assert may_change(connection, "nobody") is None
        assert connection.execute("SELECT count(*) FROM live_releases").fetchone() == (0,)
    engine = make_engine()
    with engine.connect() as bind:
        assert bind.scalar(COUNT) == 0
    engine.dispose()
    for options, role in (((), "draftstore_reader"), (("--write",), "draftstore")):
        asked = CliRunner().invoke(cli, ["sql", "--csv", "SELECT current_user", *options])
        assert asked.stdout == f"current_user\n{role}\n"


def test_an_embedded_database_of_an_earlier_version_is_migrated(
    home: Path, more_revisions: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    connect().close()
    assert not caplog.records
    more_revisions()
    with connect(reading=True) as connection:
        assert connection.execute("SELECT count(*) FROM more").fetchone() == (0,)
    assert f"migrating the catalogue from {REVISION} to 9999" in caplog.text


def test_a_command_that_reads_creates_no_database(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "postgresql" in run("db", "url").stdout
    for folder in (home, tmp_path / "none"):  # a server without tables, no server
        monkeypatch.setenv("DRAFTSTORE_HOME", str(folder))
        for command in READING if folder == home else (*READING, "db url"):
            assert f"there is no catalogue in {folder} yet: `draftstore catalogue" in refuse(*command.split())
    assert not (tmp_path / "none").exists()
    with psycopg.connect(embedded.join(home).url) as connection:
        assert database_revision(connection) is None


def test_an_engine_and_a_connection_survive_killed_servers(home: Path) -> None:
    engine = make_engine()
    connection = connect()
    (child,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    os.kill(child, signal.SIGKILL)  # the server ends all other children, too, and starts anew
    connect().close()
    connection.close()
    with engine.connect() as bind:
        assert bind.scalar(COUNT) == 0
        server = find_cluster(home).state().pid
        assert server
        os.kill(server, signal.SIGKILL)
        with pytest.raises(DatabaseAwayError, match=r"does not answer|terminat"):
            ask_until_it_fails(bind)
    with engine.connect() as bind:
        assert bind.scalar(COUNT) == 0
    connect().close()
    engine.dispose()


def ask_until_it_fails(bind: sqlalchemy.Connection) -> None:
    for _ in range(6_000):
        bind.scalar(COUNT)
        time.sleep(0.01)


# A named database


def test_a_named_database_is_migrated_by_the_command_only(
    named: str, more_revisions: Callable[[], None]
) -> None:
    for attempt in (connect, make_engine):
        with pytest.raises(DatabaseError, match=r"holds no tables, .*`draftstore db migrate`") as caught:
            attempt()
        assert "draftstore:draftstore" not in str(caught.value)
    assert migrate() == REVISION
    assert migrate() == REVISION
    make_engine().dispose()
    more_revisions()
    with pytest.raises(DatabaseError, match=f"of revision {REVISION}, and .* needs revision 9999"):
        connect()
    assert migrate() == "9999"
    connect().close()


@pytest.mark.parametrize("revision", ["0005", "from-the-future"])
def test_tables_of_other_versions_are_left_alone(named: str, revision: str) -> None:
    migrate()
    with connect() as connection:
        connection.execute("UPDATE alembic_version SET version_num = %s", (revision,))
    database._current.clear()
    for attempt in (connect, make_engine, migrate):
        with pytest.raises(DatabaseError, match=f"{revision}.*update draftstore"):
            attempt()
    with pytest.raises(
        DatabaseError, match=r"before 0\.1\.0, name an empty database .* `draftstore catalogue add`"
    ):
        migrate()


def test_the_revision_constant_equals_alembics_head() -> None:
    script = ScriptDirectory.from_config(alembic_config("postgresql://nowhere/none"))
    assert script.get_current_head() == REVISION


# Failures


def test_an_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"postgresql://me:{QUOTED}@127.0.0.1:{free_port()}/x")
    for attempt in (connect, make_engine, migrate, make_engine(check=False).connect):
        with pytest.raises(
            DatabaseAwayError, match=r"does not answer: .*refused: start it, or name"
        ) as caught:
            attempt()
        assert "s3cret" not in str(caught.value)


def test_reading_live_releases_fails_in_time_if_the_server_stops_or_hangs(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate()
    with closing(LiveReleases()) as releases:
        assert releases.read() == []
        own_server.stop()
        with pytest.raises(DatabaseAwayError):
            releases.read()
    with pytest.raises(DatabaseAwayError, match="draftstore db status"):
        LiveReleases()
    monkeypatch.setattr(database, "CONNECT_TIMEOUT", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and says nothing
        monkeypatch.setenv(VARIABLE, f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/d")
        with pytest.raises(DatabaseAwayError, match="timeout"):
            LiveReleases()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("draftstore:draftstore", f"draftstore:{QUOTED}"), "password authentication failed"),
        (("/draftstore", "/no_such_database"), "does not exist"),
    ],
)
def test_refused_connections_come_with_advice(
    named: str, change: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _, after = named.rpartition(change[0])
    monkeypatch.setenv(VARIABLE, before + change[1] + after)
    for attempt in (connect, make_engine(check=False).connect):
        with pytest.raises(DatabaseError, match=f"refuses the connection: .*{said}.*: check") as caught:
            attempt()
        assert "s3cret" not in str(caught.value)


def test_timeouts_rights_and_lost_servers_have_their_own_errors(named: str) -> None:
    with connect(check=False, autocommit=True) as connection:
        connection.execute("CREATE TABLE busy (one int)")
        timed_out = pytest.raises(DatabaseTimeoutError, match="statement timeout")
        with timed_out, database_errors(), connection.transaction():
            # The rest may take longer on a busy machine.
            connection.execute("SET LOCAL statement_timeout = '50ms'")
            connection.execute("SELECT pg_sleep(5)")
        with connect(check=False) as other:
            other.execute("LOCK TABLE busy")
            connection.execute("SET lock_timeout = '20ms'")
            with pytest.raises(DatabaseTimeoutError, match="lock timeout"), database_errors():
                connection.execute("SELECT * FROM busy")
        connection.execute("CREATE ROLE weak")
        connection.execute("SET ROLE weak")
        with pytest.raises(DatabaseError, match="permission denied"), database_errors():
            connection.execute("SELECT * FROM busy")
        connection.execute("RESET ROLE")
        connection.execute("DROP ROLE weak")
        with pytest.raises(psycopg.errors.UndefinedTable), database_errors():
            connection.execute("SELECT * FROM nowhere")
        with connect(check=False, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(DatabaseAwayError, match=r"terminating connection|closed"), database_errors():
            connection.execute("SELECT 1")


def test_full_servers_and_ended_transactions_have_their_own_errors() -> None:
    crowded = psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already")
    for error in (psycopg.errors.DiskFull("no space"), crowded):
        assert "make room" in str(translate(error))
    for state in ("25P03", "25P04"):
        assert isinstance(translate(psycopg.errors.lookup(state)("terminating")), DatabaseTimeoutError)
    assert translate(ValueError("something else")) is None


# The command


def test_commands_start_show_and_stop_the_embedded_server(home: Path) -> None:
    stopped = as_json("db", "status")
    assert (stopped["status"], stopped["used"], stopped["kept"], stopped["pid"]) == (
        "stopped", False, False, None
    )  # fmt: skip
    assert (stopped["folder"], stopped["programs"]) == (str(home / "postgres"), str(find_programs()))
    assert "stopped" in run("db", "status").stdout
    assert run("db", "status", "home").stdout == f"{home}\n"
    with pytest.raises(DraftstoreError, match="no 'url' now"):
        run("db", "status", "url")
    started = as_json("db", "start")
    assert as_json("db", "start") == started
    assert as_json("db", "url") == {"url": started["url"], "embedded": True}
    assert as_json("db", "migrate") == {"revision": REVISION}
    embedded.leave()
    # The server sees a little later that the connections have gone.
    until(lambda: as_json("db", "status")["clients"] == 0)
    found = as_json("db", "status")
    assert (found["pid"], found["schema"], found["kept"], found["used"]) == (
        started["pid"], "current", True, False
    )  # fmt: skip
    assert "kept up until" in run("db", "status").stdout
    assert as_json("db", "stop") == {"stopped": True}
    assert as_json("db", "stop") == {"stopped": False}


def test_a_named_server_is_shown_without_its_password_and_never_started_or_stopped(named: str) -> None:
    hidden = named.replace("draftstore:draftstore", "draftstore:***")
    assert run("db", "url").stdout.strip() == hidden
    found = as_json("db", "status")
    assert (found["url"], found["schema"]) == (hidden, "empty")
    assert "none (empty" in run("db", "status").stdout
    for what in ("start", "stop"):
        with pytest.raises(DraftstoreError, match=f"which draftstore does not {what}"):
            run("db", what)
