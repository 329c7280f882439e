"""The reader: what it may not do, how it is created, and how roles that may do more are refused."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from draftstore.cli import cli
from draftstore.errors import DraftstoreError
from schema.catalogue.releases import LiveReleases
from schema.db.access import make_reader, may_change
from schema.db.database import READER_VARIABLE, URL_VARIABLE, connect, migrate
from schema.db.embedded import HOME_VARIABLE
from schema.db.errors import DatabaseError
from tests.fakes.servers import PostgresServer

STATE = """
SELECT (SELECT count(*) FROM pg_class), (SELECT count(*) FROM pg_largeobject_metadata),
    (SELECT to_jsonb(pg_authid) FROM pg_authid WHERE rolname = 'draftstore_reader'),
    (SELECT array_agg(setconfig) FROM pg_db_role_setting)
"""


def ask(query: str, *options: str) -> str:
    """Return what a query prints."""
    result = CliRunner().invoke(cli, ["sql", "--csv", query, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "query",
    [
        "COMMIT; BEGIN READ WRITE; DELETE FROM builds",
        "SELECT 1; COPY (SELECT 1) TO PROGRAM 'cat > {file}'",
        "COPY (SELECT 1) TO '{file}'",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT pg_terminate_backend({owner})",
        "SET ROLE draftstore",
        "DO $$ BEGIN EXECUTE 'COPY (SELECT 1) TO PROGRAM ''cat > {file}'''; END $$",
        "DO $$ BEGIN COMMIT; SET TRANSACTION READ WRITE; PERFORM lo_create(4242); END $$",
        "ALTER SYSTEM SET archive_command = 'x'",
        "ALTER ROLE draftstore_reader SET statement_timeout = 1",
        "SELECT lo_create(4242)",
        "SELECT set_config('transaction_read_only', 'off', false)",
    ],
)
def test_no_query_gets_beyond_reading(database: str, reader: str, query: str, tmp_path: Path) -> None:
    file = tmp_path / "pwned"
    with psycopg.connect(database, autocommit=True) as owner:
        before = owner.execute(STATE).fetchone()
        with pytest.raises(DraftstoreError):
            ask(query.replace("{file}", str(file)).replace("{owner}", str(owner.info.backend_pid)))
        assert owner.execute(STATE).fetchone() == before
    assert not file.exists()


def test_the_role_cannot_write_even_in_a_read_write_transaction(database: str, reader: str) -> None:
    with psycopg.connect(reader, autocommit=True) as connection:
        for statement in (
            "DELETE FROM builds",
            "UPDATE alembic_version SET version_num = 'x'",
            "TRUNCATE builds",
            "DROP TABLE replays",
            "CREATE TABLE pwned (a int)",
            "ALTER ROLE draftstore_reader SUPERUSER",
            "SELECT lo_export(lo_from_bytea(0, 'x'), '/tmp/pwned')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())


# A server of somebody else


@pytest.fixture
def named(own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name a database of an owner who may not make roles; return the URL of an administrator."""
    with psycopg.connect(own_server.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE alice LOGIN PASSWORD 'a'")
        admin.execute("CREATE DATABASE hers OWNER alice")
    at = own_server.url.rpartition("@")[2].rpartition("/")[0]
    monkeypatch.setenv(URL_VARIABLE, f"postgresql://alice:a@{at}/hers")
    yield own_server.url.rpartition("/")[0] + "/hers"
    with psycopg.connect(own_server.url, autocommit=True) as admin:
        admin.execute("DROP DATABASE hers WITH (FORCE)")
        for role in ("alice", "bob"):
            admin.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(role)))


def test_an_owner_is_refused_with_advice(named: str) -> None:
    migrate()
    with pytest.raises(DatabaseError, match="'alice' may do more than read") as caught:
        ask("SELECT 1")
    assert "CREATE ROLE \"draftstore_reader\" LOGIN PASSWORD '...';" in str(caught.value)
    assert ask("SELECT 1 AS one", "--write") == "one\n1\n"


def test_an_owner_who_may_not_create_roles_gets_the_statements(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = f"postgresql://bob:b@{named.rpartition('@')[2]}"
    monkeypatch.setenv(READER_VARIABLE, reader)
    with pytest.raises(DatabaseError, match="permission denied to create role") as caught:
        migrate()
    statements = [line.strip() for line in str(caught.value).splitlines() if line.endswith(";")]
    with psycopg.connect(named, autocommit=True) as admin:
        for statement in statements:
            admin.execute(statement.replace("'...'", "'b'").encode())
    migrate()  # the owner may give the rights again, which another table may need
    assert ask("SELECT current_user, count(*) FROM builds") == "current_user,count\nbob,0\n"


def test_a_migration_creates_the_reader_which_suffices_for_services(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))  # no private server either
    with psycopg.connect(named, autocommit=True) as admin:
        admin.execute("ALTER ROLE alice CREATEROLE")
    monkeypatch.setenv(READER_VARIABLE, f"postgresql://bob:first@{named.rpartition('@')[2]}")
    migrate()
    reader = f"postgresql://bob:second@{named.rpartition('@')[2]}"
    monkeypatch.setenv(READER_VARIABLE, reader)
    migrate()  # with another password
    with connect() as owner:
        owner.execute("CREATE TABLE later (a int)")
    monkeypatch.delenv(URL_VARIABLE)  # as in the container of the lookup service
    releases = LiveReleases()
    assert releases.read() == []
    releases.close()
    with connect(reading=True) as connection:
        assert connection.info.user == "bob"
        assert connection.execute("SELECT count(*) FROM later").fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("INSERT INTO later VALUES (1)")


def test_a_privileged_role_is_refused_as_reader(
    named: str, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate()
    file_function = "EXECUTE ON FUNCTION pg_read_file(text)"
    trap = "FUNCTION trap()"
    with psycopg.connect(named, autocommit=True) as admin:
        admin.execute("CREATE ROLE bob LOGIN NOINHERIT PASSWORD 'b'")
        for give, take in (
            ("GRANT alice TO bob", "REVOKE alice FROM bob"),
            ("GRANT CREATE ON SCHEMA public TO bob", "REVOKE CREATE ON SCHEMA public FROM bob"),
            ("GRANT DELETE ON builds TO bob", "REVOKE DELETE ON builds FROM bob"),
            ("GRANT UPDATE (build_id) ON releases TO bob", "REVOKE UPDATE (build_id) ON releases FROM bob"),
            ("GRANT UPDATE ON builds_id_seq TO bob", "REVOKE UPDATE ON builds_id_seq FROM bob"),
            ("GRANT INSERT ON live_releases TO bob", "REVOKE INSERT ON live_releases FROM bob"),
            ("GRANT TRIGGER ON builds TO bob", "REVOKE TRIGGER ON builds FROM bob"),
            ("GRANT CREATE ON DATABASE hers TO bob", "REVOKE CREATE ON DATABASE hers FROM bob"),
            (f"GRANT {file_function} TO bob", f"REVOKE {file_function} FROM bob"),
            (f"CREATE {trap} RETURNS int LANGUAGE sql SECURITY DEFINER RETURN 1", f"DROP {trap}"),
            ("ALTER ROLE bob CREATEDB", "ALTER ROLE bob NOCREATEDB"),
        ):
            admin.execute(give.encode())
            assert may_change(admin, "bob") is True, give
            admin.execute(take.encode())
            assert may_change(admin, "bob") is False
        monkeypatch.setenv(READER_VARIABLE, own_server.url)
        with pytest.raises(DatabaseError, match="'draftstore' may do more than read"):
            migrate()
        with pytest.raises(DatabaseError, match="'draftstore' may do more than read"):
            make_reader(admin, own_server.url)
