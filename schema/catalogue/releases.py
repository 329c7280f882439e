"""Releases: names that point at builds.

Functions run in the caller's transaction; `publishing` moves releases. Services read them every few seconds on a
connection of their own.
"""

from collections import defaultdict
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, joinedload

from schema.catalogue.builds import CatalogueError
from schema.db.database import ask, connect_reader
from schema.db.errors import database_errors
from schema.models import Build, Release, ReleaseMove


def remove_release(session: Session, name: str) -> int:
    """Remove a release and its history; return the build that it pointed at. CatalogueError if there is no release."""
    release = get_release(session, name, lock=True)
    build_id = release.build_id
    session.execute(delete(ReleaseMove).filter_by(release=name))
    session.delete(release)
    session.flush()
    return build_id


def get_release(session: Session, name: str, *, lock: bool = False) -> Release:
    """Return a release, with a `lock` on its row until the end of the transaction; CatalogueError if there is none."""
    query = select(Release).filter_by(name=name).execution_options(populate_existing=True)
    release = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if release is None:
        raise CatalogueError(f"no release {name!r}: `draftstore releases list` shows all releases")
    return release


def list_releases(session: Session) -> list[Release]:
    """Return all releases sorted by name, with their builds and corpora."""
    loaded = joinedload(Release.build).joinedload(Build.corpus)
    return list(session.scalars(select(Release).options(loaded).order_by(Release.name)))


def names_by_build(session: Session) -> defaultdict[int, list[str]]:
    """Return the names of all releases by the id of the build that they point at."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, build_id in session.execute(select(Release.name, Release.build_id).order_by(Release.name)):
        names[build_id].append(name)
    return names


def release_history(session: Session, name: str) -> list[ReleaseMove]:
    """Return every move of a release, oldest first; CatalogueError if there is no such release."""
    get_release(session, name)
    return list(session.scalars(select(ReleaseMove).filter_by(release=name).order_by(ReleaseMove.id)))


def is_rolled_back(session: Session, name: str, build_id: int) -> bool:
    """Return True if the last move of a release rolled it back from a build."""
    last = session.scalars(
        select(ReleaseMove).filter_by(release=name).order_by(ReleaseMove.id.desc()).limit(1)
    ).first()
    return last is not None and last.action == "rollback" and last.from_build == build_id


def last_lengths(session: Session, name: str, build_id: int) -> dict[str, float]:
    """Return the accepted lengths, by recording, measured when a release last moved to a build."""
    moves = select(ReleaseMove.lengths).filter_by(release=name, to_build=build_id)
    return dict(session.scalars(moves.order_by(ReleaseMove.id.desc()).limit(1)).first() or {})


def build_before(session: Session, release: Release) -> int:
    """Return the build that was live before the last publication that was not rolled back."""
    published: list[int] = []
    for move in release_history(session, release.name):
        if move.action == "publish":
            published.append(move.to_build)
        else:  # undo publications down to the target of this rollback
            while published and published[-1] != move.to_build:
                published.pop()
    known = set(session.scalars(select(Build.id).where(Build.id.in_(published))))
    for build_id in reversed(published[:-1]):
        if build_id in known and build_id != release.build_id:
            return build_id
    raise CatalogueError(
        f"the release {release.name} has no build before build {release.build_id}: nothing to roll back to"
    )


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
    """A connection on which a service reads the releases."""

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
