"""The PostgreSQL backend of CREST entries: draft trees by key, the same bytes as in LMDB.

The entries of a store are the partition `trees_<build id>` of the build whose digest is that of the store's manifest.
A lookup asks the partition by its name, so that nothing is left to plan: one prepared statement, one round trip for
all keys, binary both ways.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from draftstore.entries import Entries
from draftstore.errors import StoreError
from draftstore.manifest import Manifest, manifest_digest
from schema.database import connect, database_errors

PAGE_ROWS = 4096

Entry = tuple[bytes, bytes]
Connect = Callable[[], psycopg.Connection[Any]]
Progress = Callable[[int, int], None]


def _silent(_done: int, _total: int) -> None:
    """Report nothing."""


class PostgresEntries:
    """Entries of one build. Threads may share it, and then wait for one another; a forked process connects anew."""

    def __init__(self, build_id: int, connect: Connect = connect) -> None:
        """Connect to the database.

        Args:
            build_id: a build whose trees are loaded.
            connect: opens a connection; called again when that is lost.

        Raises:
            DatabaseError: the server is away or refuses.
        """
        where = f"FROM trees_{build_id:d} WHERE build_id = {build_id:d}"
        self.build_id = build_id
        self._lookup = f"SELECT key, value {where} AND key = ANY(%b)".encode()
        self._page = f"SELECT key, value {where} AND key > %b ORDER BY key LIMIT {PAGE_ROWS}".encode()
        self._connect = connect
        with database_errors():
            self._open()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none; one round trip.

        Raises:
            DatabaseError: the server is away, and one attempt to connect anew has failed.
            StoreError: the build has been dropped.
        """
        if not keys:
            return []
        found = dict(self._rows(self._lookup, list(keys)))
        return [found.get(key) for key in keys]

    def items(self) -> Iterator[Entry]:
        """Yield all entries in key order, a page at a time: no transaction stays open between pages.

        Raises:
            DatabaseError: as `get`.
            StoreError: as `get`.
        """
        last = b""
        while page := self._rows(self._page, last):
            yield from page
            last = page[-1][0]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _open(self) -> None:
        self._connection = self._connect()
        self._connection.autocommit = True
        # The plan does not depend on the keys: it need not be made again for each lookup.
        self._connection.execute("SET plan_cache_mode = force_generic_plan")
        self._owner = os.getpid()

    def _rows(self, query: bytes, parameter: object) -> list[Entry]:
        """Run a query; on a new connection if the old one is lost, or is that of the process we were forked from."""
        with database_errors():
            try:
                if self._owner == os.getpid():
                    return self._ask(query, parameter)
            except psycopg.OperationalError:
                if not self._connection.closed:
                    raise
            self._open()
            return self._ask(query, parameter)

    def _ask(self, query: bytes, parameter: object) -> list[Entry]:
        try:
            with self._connection.cursor(binary=True) as cursor:
                return cursor.execute(query, (parameter,), prepare=True).fetchall()
        except psycopg.errors.UndefinedTable:
            raise StoreError(
                f"the database no longer holds the trees of build {self.build_id}: the build has been dropped; "
                "open a newer one, or load this store again"
            ) from None


def open_entries(path: Path, manifest: Manifest) -> PostgresEntries:
    """Open the entries of a CREST store that lie in PostgreSQL.

    Args:
        path: the store.
        manifest: its manifest.

    Raises:
        DatabaseError: the server is away or refuses.
        StoreError: the database does not know the store, or holds no trees of it.
    """
    digest = manifest_digest(path)
    with connect() as connection, database_errors():
        row = connection.execute(
            "SELECT id FROM builds WHERE digest = %s AND kind = 'crest' AND state = 'finished'"
            " AND to_regclass('trees_' || id) IS NOT NULL ORDER BY id DESC LIMIT 1",
            (digest,),
        ).fetchone()
    if row is None:
        raise StoreError(
            f"the database holds no trees of {path} (manifest {digest[:12]}; its backends are "
            f"{', '.join(manifest.parameters.get('backends', [])) or 'unknown'}): build it with --backend postgres, "
            "or set DRAFTSTORE_DATABASE_URL to the database that it was built in"
        )
    return PostgresEntries(row[0])


def load_store(
    path: Path, out: Path, manifest: Manifest, source: Entries, progress: Progress = _silent
) -> None:
    """Take the trees of a CREST store and what it kept into the database, and register it, all in one transaction.

    They become those of the build that is under way for `out`, if there is one, whose maker finishes it; else of
    the finished build that the store is registered as, now or earlier.

    Args:
        path: the store, whole, where it lies now.
        out: where it is going to be: what the catalogue says.
        manifest: its manifest.
        source: its entries.
        progress: called with the rows done and their number.

    Raises:
        DatabaseError: the server is away, refuses or is full: nothing has changed in it, try again.
        BuildError: another process loads the same store.
        StoreError: the store is damaged.
    """
    # With SQLAlchemy and polars, which take long to import and which lookups do without.
    from schema.crest_loading import load

    load(path, out, manifest, source, progress)
