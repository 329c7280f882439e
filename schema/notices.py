"""Notifications of moved releases: PostgreSQL's LISTEN and NOTIFY, from publishers to services.

    with closing(Notices()) as notices:
        live = notices.releases()
        select.select([notices], [], [], 5.0)      # until a release moves, or time to poll
        names = notices.moved()

A notification is sent when the transaction that moves a release commits. It can be lost with the connection, so a
listener must also poll.
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
    """A release and the build that it points at: columns of `releases` and `builds`."""

    name: str
    build_id: int
    kind: str
    path: str
    digest: str
    backends: list[str]


def announce(session: "Session", name: str) -> None:
    """Notify all listeners on commit that a release has moved."""
    from sqlalchemy import func, select

    session.execute(select(func.pg_notify(CHANNEL, name)))


class Notices:
    """A connection that listens for moves.

    `select` on it returns when a notification arrives or the connection is lost. Notifications that arrive during
    `releases` do not wake `select`: call `moved` after it.
    """

    def __init__(self) -> None:
        """Connect and listen; raise DatabaseError if the server is down or the tables have another revision."""
        self._connection = connect_as(
            LimitedConnection, reading=True, autocommit=True, connect_timeout=CONNECT_TIMEOUT
        )
        try:
            with database_errors():
                self._connection.execute(f"LISTEN {CHANNEL}")
        except BaseException:
            self._connection.close()
            raise

    def fileno(self) -> int:
        """Return the connection's file descriptor."""
        return self._connection.fileno()

    def moved(self) -> list[str]:
        """Return the releases that have moved since the last call, without waiting; DatabaseError may surface later."""
        with database_errors():
            return [notice.payload for notice in self._connection.notifies(timeout=0)]

    def releases(self) -> list[LiveRelease]:
        """Return all releases, sorted by name; raise DatabaseError if the connection is lost."""
        with database_errors():
            return [LiveRelease(*row) for row in self._connection.execute(LIVE).fetchall()]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
