"""The catalogue as a file: written while others work, restored into another server, also from an older PostgreSQL."""

import json
import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy.orm import Session

from draftstore.cli import cli
from schema import backup, catalogue
from schema.backup import BackupError, back_up, restore
from schema.database import URL_VARIABLE, migrate
from schema.errors import SchemaError
from schema.partitions import attach_partition, create_partition
from tests.fakes.databases import new_engine, publish, write_store
from tests.fakes.servers import postgres_server

TABLES = ("corpora", "builds", "releases", "release_moves", "trees", "live_releases")


def command(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, ["db", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def contents(url: str) -> dict[str, list[Any]]:
    with psycopg.connect(url) as connection:
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2".encode()).fetchall()
            for table in TABLES
        }


def fill(url: str, folder: Path) -> None:
    """Publish two builds, one after the other, and load a tree of the second."""
    engine = new_engine(url)
    for name in ("one", "two"):
        with Session(engine) as session, session.begin():
            build = catalogue.add_build(session, write_store(folder / name)).id
            publish(session, "chat", build)
    with psycopg.connect(url) as connection:
        for statement in (create_partition("trees", build), *attach_partition("trees", build)):
            connection.execute(statement)
        connection.execute(
            "INSERT INTO trees (build_id, key, value) VALUES (%s, %b, %b)", (build, b"k", b"\0v")
        )


def test_a_backup_brings_everything_back(
    database: str, empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(database, tmp_path)
    file = tmp_path / "new" / "catalogue.backup"
    assert command("backup", str(file)) == {"file": str(file), "bytes": file.stat().st_size}
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]
    assert file.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(tmp_path / "one")
    monkeypatch.setenv(URL_VARIABLE, empty_database)
    migrate()
    result = CliRunner().invoke(cli, ["db", "restore", str(file)], catch_exceptions=False)
    assert result.stderr.splitlines() == [f"build 1: its store is not in {tmp_path / 'one'}; copy it there"]
    assert contents(empty_database) == contents(database)
    with pytest.raises(BackupError, match="the catalogue has builds"):
        restore(file)


def test_a_backup_survives_a_failed_one(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "catalogue.backup"
    back_up(file)
    before = file.read_bytes()
    with pytest.raises(BackupError, match="exists: name another file, or pass --force"):
        command("backup", str(file))
    command("backup", str(file), "--force")
    with monkeypatch.context() as patch:
        patch.setattr(backup, "client_command", lambda *_: (["sh", "-c", "echo no room >&2; exit 1"], {}))
        with pytest.raises(BackupError, match="pg_dump failed: no room"):
            command("backup", str(file), "--force")
    assert len(file.read_bytes()) == len(before)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_what_is_no_backup_changes_nothing(database: str, tmp_path: Path) -> None:
    before = contents(database)
    (tmp_path / "text").write_text("hello")
    for file, said in ((tmp_path / "none", "does not exist"), (tmp_path / "text", "pg_restore failed")):
        with pytest.raises(BackupError, match=said):
            restore(file)
    back_up(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-5_000])
    with pytest.raises(BackupError, match="pg_restore failed"):
        restore(tmp_path / "cut")
    assert contents(database) == before


def test_an_older_major_version_is_left_by_backup_and_restore(
    empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres_server(install="pginstall") as older:
        with psycopg.connect(older.url) as connection:
            assert connection.info.server_version < 180_000
        monkeypatch.setenv(URL_VARIABLE, older.url)
        migrate()
        fill(older.url, tmp_path)
        back_up(tmp_path / "catalogue.backup")
        monkeypatch.setenv(URL_VARIABLE, empty_database)
        assert command("restore", str(tmp_path / "catalogue.backup")) == {"missing": []}
        assert contents(empty_database) == contents(older.url)


def test_a_newer_catalogue_is_for_a_newer_draftstore(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(tmp_path / "catalogue.backup")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'later'")
    monkeypatch.setattr("schema.database._current", set())
    with pytest.raises(SchemaError, match="update draftstore"):
        back_up(tmp_path / "another.backup")
