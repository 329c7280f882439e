"""The PostgreSQL backend of CREST entries: draft trees by key, the same bytes as in LMDB.

The entries of a store are the partition `trees_<build id>` of the build with the digest of the store's manifest. A
lookup names the partition directly, which saves planning: one prepared statement, one round trip for all keys, binary
both ways.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, manifest_digest
from draftstore.storage.report import OnProgress, ignore
from draftstore.stores.crest.entries import Entries
from schema.db.database import ask, connect_reader
from schema.db.errors import database_errors

PAGE_ROWS = 4096
FIND_BUILD = (
    b"SELECT id FROM builds WHERE digest = %t AND kind = 'crest' AND state = 'finished'"
    b" AND to_regclass('trees_' || id) IS NOT NULL ORDER BY id DESC LIMIT 1"
)

Entry = tuple[bytes, bytes]


class Pool:
    """A pool of reader connections, as many as threads use at the same time; a forked process connects anew."""

    def __init__(self) -> None:
        self._idle: list[psycopg.Connection[Any]] = []
        self._owner = os.getpid()
        self._inherited: list[psycopg.Connection[Any]] = []

    def fetch(self, query: bytes, parameters: Sequence[object]) -> list[Any]:
        """Run a statement in one round trip and return its rows; a lost connection is silently replaced.

        Raises DatabaseError if the server is down or refuses, or does not answer in time.
        """
        with database_errors():
            for last in (False, True):
                connection = self._take()
                try:
                    return ask(connection, query, parameters)
                except psycopg.OperationalError:
                    if last or not connection.closed:
                        raise
                    self.close()  # the others are lost too
                finally:
                    if connection.pgconn.transaction_status == TransactionStatus.IDLE:
                        self._idle.append(connection)
                    else:
                        connection.close()
        raise AssertionError("two attempts end in an answer or an error")

    def close(self) -> None:
        """Close all connections that are not in use; later calls connect anew."""
        while self._idle and self._owner == os.getpid():
            self._idle.pop().close()

    def _take(self) -> psycopg.Connection[Any]:
        if self._owner != os.getpid():  # the connections are the parent's and stay open
            self._inherited, self._idle, self._owner = self._idle, [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return connect_reader()


class PostgresEntries:
    """Entries of one build. Threads may share it, each with its own connection; a forked process reconnects."""

    def __init__(self, build_id: int, pool: Pool) -> None:
        where = f"FROM trees_{build_id:d} WHERE build_id = {build_id:d}"
        self.build_id = build_id
        self._lookup = f"SELECT key, value {where} AND key = ANY(%b)".encode()
        self._page = f"SELECT key, value {where} AND key > %b ORDER BY key LIMIT {PAGE_ROWS}".encode()
        self._pool = pool
        self._close = weakref.finalize(self, pool.close)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None if absent; one round trip. StoreError if the build has been dropped."""
        if not keys:
            return []
        found = dict(self._rows(self._lookup, list(keys)))
        return [found.get(key) for key in keys]

    def items(self) -> Iterator[Entry]:
        """Yield all entries in key order, page by page, without a transaction open between pages."""
        last = b""
        while page := self._rows(self._page, last):
            yield from page
            last = page[-1][0]

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def _rows(self, query: bytes, parameter: object) -> list[Entry]:
        try:
            return self._pool.fetch(query, (parameter,))
        except psycopg.errors.UndefinedTable:
            raise StoreError(
                f"the database no longer holds the trees of build {self.build_id}: the build has been dropped; "
                "open a newer one, or load this store again"
            ) from None


def open_entries(path: Path, manifest: Manifest) -> PostgresEntries:
    """Open a CREST store's entries in PostgreSQL; StoreError if the database has no trees of it."""
    digest, pool = manifest_digest(path), Pool()
    if rows := pool.fetch(FIND_BUILD, (digest,)):
        return PostgresEntries(rows[0][0], pool)
    pool.close()
    raise StoreError(
        f"the database holds no trees of {path} (manifest {digest[:12]}; its backends are "
        f"{', '.join(manifest.parameters.get('backends', [])) or 'unknown'}): set DRAFTSTORE_DATABASE_URL to the "
        "database that it was built in, or build it with postgres",
        "backend",
    )


def load_store(
    path: Path, out: Path, manifest: Manifest, source: Entries, progress: OnProgress = ignore
) -> None:
    """Load a CREST store's trees and n-grams into the database and register it, in one transaction.

    They are assigned to the running build for `out`, if there is one, whose process finishes it; else to the finished
    build under which the store is registered, now or earlier.
    """
    # Imports SQLAlchemy and polars, which are slow and not needed for lookups.
    from schema import statistics

    statistics.load_store(path, out, manifest, source, progress)
