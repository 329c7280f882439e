"""A real PostgreSQL for tests: one server for all, with private databases.

`session` is for most tests: its changes are rolled back. `database` is for tests with several connections or processes:
a separate database, which the commands use too. `own_server` is for tests that stop the server or need other roles.

DRAFTSTORE_TEST_DATABASE_URL names a server whose user may create databases; without it, the embedded one runs.
"""

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import alembic.command
import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Engine, NullPool, create_engine, make_url
from sqlalchemy.orm import Session

from draftstore.storage.manifest import FileEntry, Manifest, TokenizerIdentity, load_manifest, save_manifest
from schema.catalogue import publishing
from schema.catalogue.publishing import Moved
from schema.db import database as connections
from schema.db.access import make_reader
from schema.db.database import READER_VARIABLE, URL_VARIABLE, alembic_config
from schema.db.embedded import READER, join, stop
from tests.fakes.servers import PostgresServer, postgres_server, reachable_folder

SERVER_VARIABLE = "DRAFTSTORE_TEST_DATABASE_URL"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give connections the time that they may need where every processor is busy."""
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT", 60)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 60)


@contextmanager
def new_database(server: str, template: str | None = None) -> Iterator[str]:
    """Make a database, yield its URL, and drop it.

    Args:
        server: URL of any database of the server.
        template: URL of the database that it is a copy of; None: empty.
    """
    name = f"draftstore_test_{uuid.uuid4().hex[:12]}"
    made = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template:
        made += sql.SQL(" TEMPLATE {}").format(sql.Identifier(make_url(template).database or ""))
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(made)
        try:
            yield make_url(server).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def reader_of(url: str) -> str:
    """Return the URL of the reader of a database, with the password of its owner."""
    return make_url(url).set(username=READER).render_as_string(hide_password=False)


def write_store(
    folder: Path,
    *,
    kind: str = "rest",
    name: str = "small",
    corpus: str | None = "corpus-1",
    entries: int = 3,
    **parameters: Any,
) -> Path:
    """Write a directory that is a whole store as far as manifests go: one file, and a manifest that fits it."""
    folder.mkdir(parents=True)
    (folder / "entries.bin").write_bytes(bytes(range(entries)))
    known = {"fingerprint": corpus, "sources": ["texts.jsonl"], "characters": 40} if corpus else {}
    manifest = Manifest(
        kind=kind,
        name=name,
        created=f"2026-01-01T00:00:00+00:00 {folder}",  # another store, another digest
        vocab_size=100,
        token_dtype="uint16",
        tokenizer=TokenizerIdentity("small-bpe", "tokenizer-1"),
        parameters=parameters,
        corpus=known,
        counts={"documents": 2, "tokens": 10, "entries": entries},
        files={"entries.bin": FileEntry.of(folder / "entries.bin")},
    )
    save_manifest(folder, manifest)
    return folder


def publish(session: Session, name: str, build_id: int, **options: Any) -> Moved:
    """Publish a build within a session, whose changes may be undone."""
    return publishing.publish(lambda: nullcontext(session), name, build_id, **options)


def rollback(session: Session, name: str, **options: Any) -> Moved:
    """Roll a release back within a session."""
    return publishing.rollback(lambda: nullcontext(session), name, **options)


@pytest.fixture(scope="session")
def database_server() -> Iterator[str]:
    """Return the URL of a server where databases may be made."""
    if named := os.environ.get(SERVER_VARIABLE):
        yield named
        return
    with reachable_folder() as home:
        url = join(home, keep=True).url  # whatever else a test leaves
        with psycopg.connect(url, autocommit=True) as connection:  # its data are not worth waiting for
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        yield url
        stop(home)


@pytest.fixture(scope="session")
def _password_server() -> Iterator[PostgresServer]:
    with postgres_server(arguments=("postgres", "-c", "fsync=off")) as server:
        yield server


@pytest.fixture
def own_server(_password_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> PostgresServer:
    """Return a server with a password on a port, which a test may stop; commands use its database, which is empty."""
    server = _password_server
    if server.process is None or server.process.poll() is not None:
        server.start()
    with psycopg.connect(server.url.rpartition("/")[0] + "/postgres", autocommit=True) as connection:
        connection.execute("DROP DATABASE draftstore WITH (FORCE)")
        connection.execute("CREATE DATABASE draftstore")
    monkeypatch.setenv(URL_VARIABLE, server.url)
    monkeypatch.delenv(READER_VARIABLE, raising=False)
    monkeypatch.setattr(connections, "_current", set())
    return server


@pytest.fixture
def empty_database(database_server: str) -> Iterator[str]:
    """Return the URL of a database without tables."""
    with new_database(database_server) as url:
        yield url


@pytest.fixture(scope="session")
def template_database(database_server: str) -> Iterator[str]:
    """Return the URL of a database with our tables, to make copies of; nobody connects to it."""
    with new_database(database_server) as url:
        alembic.command.upgrade(alembic_config(url), "head")
        with psycopg.connect(url, autocommit=True) as connection:
            make_reader(connection, reader_of(url))
        yield url


@pytest.fixture
def database(database_server: str, template_database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a new database with our tables, which is the one of all commands during the test."""
    with new_database(database_server, template_database) as url:
        monkeypatch.setenv(URL_VARIABLE, url)
        yield url


@pytest.fixture
def reader(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of the reader of the test's own database, as whom the commands ask."""
    url = reader_of(database)
    monkeypatch.setenv(READER_VARIABLE, url)
    return url


def new_engine(url: str) -> Engine:
    """Return an engine without pool on a database, by its URL with or without a driver."""
    return create_engine(make_url(url).set(drivername="postgresql+psycopg"), poolclass=NullPool)


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    """Return an engine on a database of the test's own."""
    engine = new_engine(database)
    yield engine
    engine.dispose()


@pytest.fixture(scope="session")
def shared_database(database_server: str, template_database: str) -> Iterator[str]:
    """Return the URL of a database with our tables in which nothing is ever committed."""
    with new_database(database_server, template_database) as url:
        yield url


@pytest.fixture(scope="session")
def shared_engine(shared_database: str) -> Iterator[Engine]:
    """Return an engine on the database in which nothing is ever committed."""
    engine = new_engine(shared_database)
    yield engine
    engine.dispose()


@pytest.fixture
def session(shared_engine: Engine) -> Iterator[Session]:
    """Return a session whose changes are undone after the test, committed ones too."""
    with shared_engine.connect() as connection:
        transaction = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        transaction.rollback()


def in_both_backends(crest: Path, folder: Path) -> Path:
    """Copy a store to a folder, and have its manifest say that it is in PostgreSQL, too; return the folder."""
    shutil.copytree(crest, folder)
    manifest = load_manifest(folder)
    parameters = {**manifest.parameters, "backends": ["lmdb", "postgres"]}
    save_manifest(folder, dataclasses.replace(manifest, parameters=parameters))
    return folder
