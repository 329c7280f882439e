"""The database that everything uses: which one, how failures read, whose tables are accepted, `draftstore db`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import sqlalchemy
from alembic.script import ScriptDirectory
from click.testing import CliRunner, Result

from draftstore.cli import cli
from draftstore.errors import DraftstoreError
from schema.cli.db import db
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
from schema.db.embedded import find_cluster
from schema.db.errors import (
    DatabaseAccessError,
    DatabaseAwayError,
    DatabaseFullError,
    DatabaseTimeoutError,
    DatabaseUrlError,
    SchemaError,
)
from schema.db.failures import database_errors, translate
from schema.db.home import data_home, find_programs
from tests.fakes.servers import PostgresServer, free_port, postgres_server
from tests.fakes.waiting import until
from tests.process.test_embedded import memory_folder, reachable_folder

SECRET = "s3cret/with@signs"
COUNT = sqlalchemy.text("SELECT count(*) FROM builds")
QUOTED = "s3cret%2Fwith%40signs"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Return a server with a password on a port, whose database is empty at first."""
    with postgres_server() as running:
        yield running


@pytest.fixture
def named(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name that server, with no tables in its database; its address stands for a server of one's own."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        connection.execute("GRANT USAGE ON SCHEMA public TO public")
    monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", server.url)
    database._current.clear()
    return server.url


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Name an empty data folder for the embedded server."""
    monkeypatch.delenv("DRAFTSTORE_DATABASE_URL", raising=False)
    with reachable_folder(memory_folder()) as folder:
        monkeypatch.setenv("DRAFTSTORE_HOME", str(folder))
        yield folder
        embedded.leave()
        embedded.stop(folder)


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
            'def upgrade():\n    op.execute("CREATE TABLE more (one int)")\n\n\n'
            'def downgrade():\n    op.execute("DROP TABLE more")\n'
        )
        monkeypatch.setattr(database, "REVISION", "9999")
        database._current.clear()

    return add


# Which database


def test_a_named_url_is_used_with_or_without_the_name_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", f"{scheme}://me:{QUOTED}@db:5433/x?sslmode=require")
        assert database_url() == f"postgresql://me:{QUOTED}@db:5433/x?sslmode=require"


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://me:{QUOTED}@db/x",
        f"postgresql+psycopg2://me:{QUOTED}@db/x",
        f"postgresql://me:{SECRET}%zz@db/x",
        f"postgresql://me:{QUOTED}@db:port/x",
        f"postgresql://me:{QUOTED}@db/x?no_such_option=1",
        f"host=db password={SECRET}",
        "   ",
    ],
)
def test_what_is_no_url_of_postgresql_is_refused_without_quoting_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", url)
    with pytest.raises(DatabaseUrlError, match="expected postgresql://USER:PASSWORD@HOST") as caught:
        connect()
    assert "s3cret" not in str(caught.value)


def test_the_home_is_the_users_own_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_embedded_database_gets_its_tables_by_itself(home: Path) -> None:
    with connect() as connection:
        assert database_revision(connection) == REVISION
        assert connection.execute("SELECT count(*) FROM builds").fetchone() == (0,)
        assert connection.info.get_parameters()["application_name"] == "draftstore"
    engine = make_engine()
    with engine.connect() as bind:
        assert bind.exec_driver_sql("SELECT count(*) FROM builds").scalar() == 0
    engine.dispose()
    assert database_url() == find_cluster(home).url


def test_the_embedded_database_has_a_reader(home: Path) -> None:
    with connect(reading=True) as connection:
        assert connection.info.user == "draftstore_reader"
        assert may_change(connection, "draftstore_reader") is False
        assert may_change(connection, "draftstore") is True
        assert may_change(connection, "nobody") is None
        assert connection.execute("SELECT count(*) FROM live_releases").fetchone() == (0,)
    for options, role in (((), "draftstore_reader"), (("--write",), "draftstore")):
        asked = CliRunner().invoke(cli, ["sql", "--csv", "SELECT current_user", *options])
        assert asked.stdout == f"current_user\n{role}\n"


def test_processes_that_all_come_first_make_the_tables_once(home: Path) -> None:
    code = "from schema.db.database import connect; print(connect().execute('SELECT count(*) FROM builds').fetchone())"
    run = [sys.executable, "-W", "ignore::ResourceWarning", "-c", code]
    processes = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.communicate(timeout=60)[0] == "(0,)\n"
        assert process.returncode == 0


def test_an_embedded_database_of_an_earlier_version_is_brought_up_to_date(
    home: Path, more_revisions: Callable[[], None]
) -> None:
    connect().close()
    more_revisions()
    with connect() as connection:
        assert connection.execute("SELECT count(*) FROM more").fetchone() == (0,)


def test_an_engine_and_a_connection_survive_a_killed_server(home: Path) -> None:
    engine = make_engine()
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


def test_connections_wait_for_a_server_that_recovers(home: Path) -> None:
    engine = make_engine()
    connection = connect()
    (child,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    os.kill(child, signal.SIGKILL)  # the server ends all other children, too, and starts anew
    connect().close()
    connection.close()
    with engine.connect() as bind:
        assert bind.scalar(COUNT) == 0
    engine.dispose()


def ask_until_it_fails(bind: sqlalchemy.Connection) -> None:
    for _ in range(6_000):
        bind.scalar(COUNT)
        time.sleep(0.01)


# A named database


def test_a_named_database_is_migrated_on_demand_only(named: str) -> None:
    for attempt in (connect, make_engine):
        with pytest.raises(SchemaError, match=r"holds no tables, .*`draftstore db migrate`") as caught:
            attempt()
        assert "draftstore:draftstore" not in str(caught.value)
    assert migrate() == REVISION
    assert migrate() == REVISION
    with connect() as connection:
        assert connection.execute("SELECT count(*) FROM builds").fetchone() == (0,)
    make_engine().dispose()


def test_tables_of_an_earlier_version_wait_for_the_command(
    named: str, more_revisions: Callable[[], None]
) -> None:
    migrate()
    more_revisions()
    with pytest.raises(SchemaError, match=f"of revision {REVISION}, and .* needs revision 9999"):
        connect()
    assert migrate() == "9999"
    connect().close()


def test_tables_of_a_later_version_are_left_alone(named: str) -> None:
    migrate()
    with connect() as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'from-the-future'")
    database._current.clear()
    for attempt in (connect, make_engine, migrate):
        with pytest.raises(SchemaError, match=r"from-the-future.*update draftstore"):
            attempt()


def test_our_short_way_to_the_newest_revision_agrees_with_alembic(named: str) -> None:
    assert ScriptDirectory.from_config(alembic_config()).get_current_head() == REVISION


# Failures


def test_a_server_that_is_away_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", f"postgresql://me:{QUOTED}@127.0.0.1:{free_port()}/x")
    for attempt in (connect, make_engine, migrate, make_engine(check=False).connect):
        with pytest.raises(
            DatabaseAwayError, match=r"does not answer: .*refused: start it, or name"
        ) as caught:
            attempt()
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("draftstore:draftstore", f"draftstore:{QUOTED}"), "password authentication failed"),
        (("draftstore:draftstore", f"nobody_known:{QUOTED}"), "authentication failed"),
        (("draftstore:draftstore@", "draftstore@"), "no password supplied"),
        (("/draftstore", "/no_such_database"), "does not exist"),
    ],
)
def test_a_refusal_says_what_to_check(
    named: str, change: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _, after = named.rpartition(change[0])
    monkeypatch.setenv("DRAFTSTORE_DATABASE_URL", before + change[1] + after)
    for attempt in (connect, make_engine(check=False).connect):
        with pytest.raises(DatabaseAccessError, match=f"refuses the connection: .*{said}.*: check") as caught:
            attempt()
        assert "s3cret" not in str(caught.value)


def test_timeouts_rights_and_lost_servers_are_told_apart(named: str) -> None:
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
        with pytest.raises(DatabaseAccessError, match="permission denied"), database_errors():
            connection.execute("SELECT * FROM busy")
        connection.execute("RESET ROLE")
        connection.execute("DROP ROLE weak")
        with pytest.raises(psycopg.errors.UndefinedTable), database_errors():
            connection.execute("SELECT * FROM nowhere")
        with connect(check=False, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        with pytest.raises(DatabaseAwayError, match=r"terminating connection|closed"), database_errors():
            connection.execute("SELECT 1")


def test_an_engine_raises_our_errors_and_leaves_those_of_the_program(named: str) -> None:
    engine = make_engine(check=False)
    with engine.connect() as bind:
        with pytest.raises(DatabaseTimeoutError):
            bind.exec_driver_sql("SET LOCAL statement_timeout = 20; SELECT pg_sleep(5)")
        bind.rollback()
        with pytest.raises(sqlalchemy.exc.ProgrammingError):
            bind.exec_driver_sql("SELECT * FROM nowhere")
    engine.dispose()


def test_full_servers_are_told_from_absent_ones() -> None:
    assert isinstance(translate(psycopg.errors.DiskFull("no space")), DatabaseFullError)
    crowded = psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already")
    assert isinstance(translate(crowded), DatabaseFullError)
    assert translate(ValueError("something else")) is None


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(db, arguments, catch_exceptions=False)


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_is_found_by_its_entry_point() -> None:
    entry_point = EntryPoint("db", "schema.cli.db:db", "draftstore.commands")
    assert entry_point.load() is db
    assert all("Example" in (command.help or "") for command in [db, *db.commands.values()])


def test_the_command_looks_after_the_embedded_server(home: Path) -> None:
    assert run_json("status") == {
        "embedded": True,
        "status": "stopped",
        "folder": str(home / "postgres"),
        "programs": str(find_programs()),
        "used": False,
        "kept": False,
        "pid": None,
    }
    assert "stopped" in run("status").stdout
    assert not (home / "postgres").exists()
    started = run_json("start")
    assert run_json("start") == started
    assert run_json("url") == {"url": started["url"], "embedded": True}
    assert run_json("migrate") == {"revision": REVISION}
    embedded.leave()
    # The server sees a little later that the connections have gone.
    until(lambda: run_json("status")["clients"] == 0)
    found = run_json("status")
    assert found["kept"]
    assert found["pid"] == started["pid"]
    assert found["schema"] == "current"
    assert found["clients"] == 0
    assert found["bytes"] > 1_000_000
    shown = run("status").stdout
    assert "kept up until" in shown
    assert not found["used"]
    assert f"{found['bytes']:,}" in shown
    embedded.leave()
    assert run_json("stop") == {"stopped": True}
    assert run_json("stop") == {"stopped": False}
    assert "was not running" in run("stop").stdout


def test_the_command_shows_no_password(named: str) -> None:
    hidden = named.replace("draftstore:draftstore", "draftstore:***")
    assert run("url").stdout.strip() == hidden
    found = run_json("status")
    assert found["url"] == hidden
    assert found["schema"] == "empty"
    assert "none (empty" in run("status").stdout


def test_a_named_server_is_not_ours_to_start_or_stop(named: str) -> None:
    for what in ("start", "stop"):
        with pytest.raises(Exception, match=f"which draftstore does not {what}"):
            run(what)
    assert isinstance(db, click.Group)
