"""The PostgreSQL backend of CREST entries: draft trees by key, the same bytes as in LMDB.

The entries of a store are the partition `trees_<build id>` of the build whose digest is that of the store's manifest.
A lookup asks the partition by its name, so that nothing is left to plan: one prepared statement, one round trip for
all keys, binary both ways. All stores of a process share one pool of connections.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psycopg

from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, manifest_digest
from draftstore.stores.crest.entries import Entries
from schema.pooling import SharedPool, join_pool

PAGE_ROWS = 4096
GET_SECONDS = 2.0
"""How long a lookup may take: a thousand times what it does."""
PAGE_SECONDS = 60.0
"""How long reading a page may take, from a cold disk."""
FIND_BUILD = (
    b"SELECT id FROM builds WHERE digest = %t AND kind = 'crest' AND state = 'finished'"
    b" AND to_regclass('trees_' || id) IS NOT NULL ORDER BY id DESC LIMIT 1"
)

Entry = tuple[bytes, bytes]
Progress = Callable[[int, int], None]


def _silent(_done: int, _total: int) -> None:
    """Report nothing."""


class PostgresEntries:
    """Entries of one build. Threads share it, each on a connection of its own; a forked process connects anew."""

    def __init__(self, build_id: int, pool: SharedPool | None = None) -> None:
        """Read through a pool.

        Args:
            build_id: a build whose trees are loaded.
            pool: connections, which are left at the end; None joins those that everything shares.

        Raises:
            DatabaseError: there is no such server, or the embedded one cannot be started.
        """
        where = f"FROM trees_{build_id:d} WHERE build_id = {build_id:d}"
        self.build_id = build_id
        self._lookup = f"SELECT key, value {where} AND key = ANY(%b)".encode()
        self._page = f"SELECT key, value {where} AND key > %b ORDER BY key LIMIT {PAGE_ROWS}".encode()
        self._pool = pool or join_pool()
        self._leave = weakref.finalize(self, self._pool.leave)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where there is none; one round trip.

        Raises:
            DatabaseError: the server is away or hangs, and one attempt to connect anew has failed.
            StoreError: the build has been dropped.
        """
        if not keys:
            return []
        found = dict(self._rows(self._lookup, list(keys), GET_SECONDS))
        return [found.get(key) for key in keys]

    def items(self) -> Iterator[Entry]:
        """Yield all entries in key order, a page at a time: no transaction stays open between pages.

        Raises:
            DatabaseError: as `get`.
            StoreError: as `get`.
        """
        last = b""
        while page := self._rows(self._page, last, PAGE_SECONDS):
            yield from page
            last = page[-1][0]

    def close(self) -> None:
        """Let go of the connections, which others may use on."""
        self._leave()

    def _rows(self, query: bytes, parameter: object, seconds: float) -> list[Entry]:
        try:
            return self._pool.fetch(query, (parameter,), seconds)
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
    pool = join_pool()
    try:
        rows = pool.fetch(FIND_BUILD, (digest,), PAGE_SECONDS)
        if rows:
            return PostgresEntries(rows[0][0], pool)
    except BaseException:
        pool.leave()
        raise
    pool.leave()
    raise StoreError(
        f"the database holds no trees of {path} (manifest {digest[:12]}; its backends are "
        f"{', '.join(manifest.parameters.get('backends', [])) or 'unknown'}): build it with --backend postgres, "
        "or set DRAFTSTORE_DATABASE_URL to the database that it was built in"
    )


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
