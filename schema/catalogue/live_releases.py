"""The live releases, which services read every few seconds on one connection."""

from typing import NamedTuple

from schema.db.database import ask, connect_reader
from schema.db.errors import database_errors

LIVE = (
    b"SELECT releases.name, build_id, kind, path, digest, backends FROM releases JOIN builds ON builds.id = build_id"
    b" ORDER BY releases.name"
)


class LiveRelease(NamedTuple):
    """A release and the build that it points at: columns of `releases` and `builds`."""

    name: str
    build_id: int
    kind: str
    path: str
    digest: str
    backends: list[str]


class LiveReleases:
    """A connection that reads the releases."""

    def __init__(self) -> None:
        """Connect; raise DatabaseError if the server is down or the tables have another revision."""
        self._connection = connect_reader()

    def read(self) -> list[LiveRelease]:
        """Return all releases, sorted by name; raise DatabaseError if the connection is lost."""
        with database_errors():
            return [LiveRelease(*row) for row in ask(self._connection, LIVE)]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
