"""Word of releases that move: PostgreSQL carries it from whoever publishes to whoever serves.

    with closing(Notices()) as notices:
        live = notices.releases()
        select.select([notices], [], [], 5.0)      # a release has moved, or look again anyway
        names = notices.moved()

A notice is sent with the transaction that moves a release, and only if that is committed. It may be lost with the
connection, so that a listener also looks by itself now and then.
"""

from typing import TYPE_CHECKING, NamedTuple

from schema.database import connect_as
from schema.failures import database_errors
from schema.pooling import CONNECT_TIMEOUT, LimitedConnection

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

CHANNEL = "draftstore_releases"
LIVE = (
    "SELECT releases.name, build_id, kind, path, digest, backends FROM releases JOIN builds ON builds.id = build_id"
    " ORDER BY releases.name"
)


class LiveRelease(NamedTuple):
    """A release and the build that it points at.

    Attributes:
        name: of the release.
        build_id: of the build in the catalogue.
        kind: of the store.
        path: directory of the store.
        digest: SHA-256 of its manifest.
        backends: where its entries lie, if it is of kind `crest`.
    """

    name: str
    build_id: int
    kind: str
    path: str
    digest: str
    backends: list[str]


def announce(session: "Session", name: str) -> None:
    """Tell all listeners, once the transaction is committed, that a release has moved."""
    from sqlalchemy import func, select

    session.execute(select(func.pg_notify(CHANNEL, name)))


class Notices:
    """A connection that hears of moves.

    `select` on it returns when there is something to hear, or it is lost. What comes while `releases` is asked is not
    announced so: ask `moved` after it.
    """

    def __init__(self) -> None:
        """Connect and listen.

        Raises:
            DatabaseError: the server is away or refuses, or the tables are not those that we need.
        """
        self._connection = connect_as(LimitedConnection, autocommit=True, connect_timeout=CONNECT_TIMEOUT)
        try:
            with database_errors():
                self._connection.execute(f"LISTEN {CHANNEL}")
        except BaseException:
            self._connection.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.fileno()

    def moved(self) -> list[str]:
        """Return the releases that have moved since this was asked last, without waiting.

        Raises:
            DatabaseError: the connection is lost; that may also show only when `releases` is asked.
        """
        with database_errors():
            return [notice.payload for notice in self._connection.notifies(timeout=0)]

    def releases(self) -> list[LiveRelease]:
        """Return all releases by name.

        Raises:
            DatabaseError: the connection is lost, or the server hangs.
        """
        with database_errors():
            return [LiveRelease(*row) for row in self._connection.execute(LIVE).fetchall()]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
