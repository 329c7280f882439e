"""What servers, environments, URLs and poolers set for a session: the same n-grams, drafts and times, or a sentence."""

import csv
import io
import os
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import func, make_url, select
from sqlalchemy.orm import Session

from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest.entries import LMDB_FILE, LmdbEntries, open_entries
from draftstore.stores.crest.store import KEPT_FILE
from schema.catalogue.builds import let_go, list_builds, start_build
from schema.catalogue.releases import LiveReleases
from schema.db import database as connections
from schema.db.database import READER_VARIABLE, URL_VARIABLE, make_engine, migrate
from schema.db.embedded import READER
from schema.db.errors import DatabaseError
from schema.statistics import ngram_texts, store_tokenizer
from schema.trees import load_store
from tests.fakes.databases import SERVER_VARIABLE, in_both_backends
from tests.fakes.poolers import pooler
from tests.fakes.waiting import in_threads
from tests.unit.schema.test_sql import as_json, refuse, run

ODD = {
    "client_encoding": "LATIN1",
    "DateStyle": "German, DMY",
    "TimeZone": "Asia/Kolkata",
    "IntervalStyle": "iso_8601",
    "bytea_output": "escape",
    "standard_conforming_strings": "off",
}
VARIABLES = {"PGCLIENTENCODING": "LATIN1", "PGDATESTYLE": "SQL, DMY", "PGTZ": "America/New_York"}
OPTIONS = "client_encoding=SQL_ASCII&options=-c%20datestyle%3DPostgres%20-c%20intervalstyle%3Dsql_standard"

TIMES = """
SELECT DATE '2026-02-01' AS day, TIMESTAMPTZ '2026-02-01 03:04:05Z' AS time, INTERVAL '25 hours' AS "ü"
"""


@pytest.fixture(scope="module")
def crest(small_crest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that says that it is in PostgreSQL, too."""
    return in_both_backends(small_crest, tmp_path_factory.mktemp("crest") / "store")


def set_for_all(database: str) -> None:
    """Have a database set what is odd for all its sessions."""
    name = sql.Identifier(make_url(database).database or "")
    with psycopg.connect(database, autocommit=True) as connection:
        for setting, value in ODD.items():
            connection.execute(
                sql.SQL("ALTER DATABASE {} SET {} = {}").format(name, sql.Identifier(setting), value)
            )


def loads_and_answers(crest: Path) -> None:
    """Load a store and read it back in every way; all that comes back is what went in."""
    manifest, source = load_manifest(crest), LmdbEntries(crest / LMDB_FILE)
    load_store(crest, crest, manifest, source)
    items = list(source.items())
    with closing(open_entries(crest, manifest, "postgres")) as entries:

        def look_up() -> None:
            for key, value in items[::9]:
                assert entries.get([key, b""]) == [value, None]

        in_threads([look_up] * 3)
        assert list(entries.items()) == items
    ngrams = pl.read_parquet(crest / KEPT_FILE)["tokens"].to_list()
    expected = sorted(ngram_texts(store_tokenizer(crest, manifest), ngrams))
    assert not "".join(expected).isascii()
    rows = as_json("sql", 'SELECT text FROM kept_ngrams ORDER BY text COLLATE "C"')
    assert [row["text"] for row in rows] == expected
    [row] = csv.DictReader(io.StringIO(run("sql", "--csv", TIMES).stdout))
    assert row == {"day": "2026-02-01", "time": "2026-02-01 03:04:05+00:00", "ü": "1 day, 1:00:00"}
    [row] = as_json("sql", "SELECT count(*) AS lines FROM builds WHERE kind = 'crest'", "--write")
    assert row == {"lines": 1}
    engine = make_engine()
    with Session(engine) as session:
        for _ in range(8):  # often enough to prepare statements
            [build] = list_builds(session, kind="crest")
        assert isinstance(build.started_at, datetime)
        assert session.scalar(select(func.make_interval(0, 0, 0, 1))) == timedelta(days=1)
    engine.dispose()
    with closing(LiveReleases()) as releases:
        assert [releases.read() for _ in range(8)] == [[]] * 8


def start_a_build() -> None:
    """Start a build as flows do, and leave it."""
    engine = make_engine()
    try:
        with Session(engine) as session, session.begin():
            build = start_build(session, "rest", "small", Path("/small"))
            let_go(engine, build.id)
    finally:
        engine.dispose()


@pytest.mark.parametrize("kind", ["plain", "database", "environment", "url", "all"])
def test_settings_that_sessions_inherit_change_nothing(
    kind: str, database: str, reader: str, crest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("database", "all"):
        set_for_all(database)
    if kind in ("environment", "all"):
        for variable, value in VARIABLES.items():
            monkeypatch.setenv(variable, value)
    if kind in ("url", "all"):
        for variable, url in ((URL_VARIABLE, database), (READER_VARIABLE, reader)):
            monkeypatch.setenv(variable, f"{url}{'&' if '?' in url else '?'}{OPTIONS}")
    assert migrate() == connections.REVISION
    loads_and_answers(crest)
    start_a_build()


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_of_another_encoding_is_refused_in_a_sentence(
    encoding: str, database_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"draftstore_test_{encoding.lower()}"
    made = "CREATE DATABASE {} ENCODING {} LOCALE_PROVIDER libc LOCALE 'C' TEMPLATE template0"
    url = make_url(database_server).set(database=name).render_as_string(hide_password=False)
    monkeypatch.setenv(URL_VARIABLE, url)
    monkeypatch.delenv(READER_VARIABLE, raising=False)
    with psycopg.connect(database_server, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
        connection.execute(sql.SQL(made).format(sql.Identifier(name), encoding))
        try:
            for command in (("db", "status"), ("db", "migrate"), ("sql", "SELECT 1"), ("catalogue", "list")):
                assert f"'{name}' on" in (why := refuse(*command))
                assert f"has the encoding {encoding}, but texts need UTF8" in why
            with pytest.raises(DatabaseError, match="UTF8"):
                make_engine(check=False).connect()
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.skipif(SERVER_VARIABLE in os.environ, reason="poolers log in without a password")
@pytest.mark.parametrize("turns", [False, True])
def test_behind_a_pooler_all_but_builds_works(
    turns: bool, database: str, crest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_for_all(database)
    name, direct = str(make_url(database).database), database
    with pooler(database, turns=turns) as between:
        monkeypatch.setenv(URL_VARIABLE, between.url("draftstore", name))
        monkeypatch.setenv(READER_VARIABLE, between.url(READER, name))
        assert migrate() == connections.REVISION
        loads_and_answers(crest)
        assert "not exist" in refuse("sql", "SELECT x")
        assert run("sql", "--write", "CREATE TABLE more (one int); DROP TABLE more").stdout.endswith(
            "DROP TABLE\n"
        )
        with pytest.raises(DatabaseError, match=r"behind the pooler .* direct URL"):
            start_a_build()
        monkeypatch.setenv(URL_VARIABLE, direct)
        start_a_build()
