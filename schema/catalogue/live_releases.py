"""The live releases, which services read every few seconds on one connection."""

from typing import NamedTuple

from schema.db.database import connect_reader
from schema.db.failures import database_errors

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


class LiveReleases:
    """A connection that reads the releases."""

    def __init__(self) -> None:
        """Connect; raise DatabaseError if the server is down or the tables have another revision."""
        self._connection = connect_reader()

    def read(self) -> list[LiveRelease]:
        """Return all releases, sorted by name; raise DatabaseError if the connection is lost."""
        with database_errors():
            return [LiveRelease(*row) for row in self._connection.execute(LIVE).fetchall()]

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
