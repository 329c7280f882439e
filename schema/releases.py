"""Releases: names that point at builds, moved by publishing and rollback.

A move is one transaction of the caller with a lock on the release; the slow part, reading every byte of the store,
comes before the lock. Readers see the old or the new build, and listeners are notified on commit (`schema.notices`).
"""

import re
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, joinedload

from draftstore.errors import DraftstoreError, StoreError, counted
from draftstore.storage.manifest import Manifest, load_manifest, manifest_digest, verify_files
from draftstore.stores.registry import KINDS, kind_of
from schema.builds import CatalogueError, get_build
from schema.models import RELEASE_NAME, Build, Release, ReleaseMove
from schema.notices import announce

Verify = Callable[[Build], list[str]]


def verify_build(build: Build, on_bytes: Callable[[int], None] = lambda _: None) -> list[str]:
    """Read every byte of a build's store, in files and database, and compare it with the recorded hashes.

    Args:
        build: a finished build.
        on_bytes: called with the size of each file after it was read, for progress bars.

    Returns:
        One sentence for each problem; empty if there is none.

    Raises:
        DatabaseError: entries lie in the database, and it is down.
    """
    path = Path(build.path)
    try:
        manifest = load_manifest(path, build.kind)
        found = manifest_digest(path)
    except (DraftstoreError, OSError) as error:
        return [str(error)]
    if found != build.digest:
        return [f"{path} now holds another store (manifest {found[:12]}, expected {str(build.digest)[:12]})"]
    return verify_files(path, manifest, on_bytes) or _entry_problems(path, manifest)


def _entry_problems(path: Path, manifest: Manifest) -> list[str]:
    """Return the problems of a store's entries in PostgreSQL."""
    if not manifest.parameters.get("backends"):
        return []  # avoids importing the kind's kernels
    try:
        return kind_of(manifest.kind).verify_entries(path, manifest)
    except StoreError as error:
        return [str(error)]


def publish(session: Session, name: str, build_id: int, *, verify: Verify = verify_build) -> Release:
    """Point a release at a build; publishing the live build again changes nothing.

    Args:
        session: open session.
        name: name of the release, created if new.
        build_id: id of a finished build.
        verify: returns the problems of a build.

    Raises:
        CatalogueError: no such build, it is unfinished, fails verification or cannot draft, or the name is invalid.
    """
    if not re.fullmatch(RELEASE_NAME, name):
        raise CatalogueError(
            f"{name!r} cannot be the name of a release: expected letters, digits, '.', '_' and '-', with a letter or "
            "digit first"
        )
    build = get_build(session, build_id)
    if build.kind not in KINDS:
        raise CatalogueError(
            f"build {build_id} is of kind {build.kind!r}, which gives no drafts: publish a store instead"
        )
    _require_finished(build)
    _require_whole(build, verify)
    _require_finished(get_build(session, build_id, lock=True))  # cannot be dropped from here on
    made = (
        insert(Release).values(name=name, build_id=build_id).on_conflict_do_nothing().returning(Release.name)
    )
    if session.scalars(made).one_or_none():
        session.add(ReleaseMove(release=name, from_build=None, to_build=build_id, action="publish"))
        session.flush()
        announce(session, name)
        return get_release(session, name)
    release = get_release(session, name, lock=True)
    if release.build_id != build_id:
        _move(session, release, build_id, "publish")
    return release


def rollback(session: Session, name: str, *, verify: Verify = verify_build) -> Release:
    """Point a release at the previous build; repeated calls go back through all published builds.

    A rollback undoes a publishing: after publishing 1, 2 and 3 it goes to 2, then to 1; after publishing 4 from there,
    back to 1. Builds dropped since are skipped.

    Raises:
        CatalogueError: no such release, no previous build, it fails verification, or another process moved the release
            meanwhile.
    """
    release = get_release(session, name)
    before = _build_before(session, release)
    _require_whole(get_build(session, before), verify)
    _require_finished(get_build(session, before, lock=True))
    release = get_release(session, name, lock=True)
    if _build_before(session, release) != before:
        raise CatalogueError(
            f"the release {name} has just been moved by another process: see `draftstore releases list`, and try again"
        )
    _move(session, release, before, "rollback")
    return release


def remove(session: Session, name: str) -> int:
    """Remove a release and its history; return the build that it pointed at, which stays.

    Raises:
        CatalogueError: no such release.
    """
    release = get_release(session, name, lock=True)
    build_id = release.build_id
    session.execute(delete(ReleaseMove).filter_by(release=name))
    session.delete(release)
    session.flush()
    announce(session, name)
    return build_id


def get_release(session: Session, name: str, *, lock: bool = False) -> Release:
    """Return a release.

    Args:
        session: open session.
        name: its name.
        lock: lock the row until the end of the transaction.

    Raises:
        CatalogueError: no such release.
    """
    query = select(Release).filter_by(name=name).execution_options(populate_existing=True)
    release = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if release is None:
        raise CatalogueError(f"no release {name!r}: `draftstore releases list` shows all releases")
    return release


def list_releases(session: Session) -> list[Release]:
    """Return all releases sorted by name, with their builds and corpora."""
    loaded = joinedload(Release.build).joinedload(Build.corpus)
    return list(session.scalars(select(Release).options(loaded).order_by(Release.name)))


def release_history(session: Session, name: str) -> list[ReleaseMove]:
    """Return every move of a release, oldest first.

    Raises:
        CatalogueError: no such release.
    """
    get_release(session, name)
    return list(session.scalars(select(ReleaseMove).filter_by(release=name).order_by(ReleaseMove.id)))


def _build_before(session: Session, release: Release) -> int:
    """Return the build that was live before the last publishing that was not rolled back.

    Raises:
        CatalogueError: there is none.
    """
    published: list[int] = []
    for move in release_history(session, release.name):
        if move.action == "publish":
            published.append(move.to_build)
        else:  # undo publishings down to the target of this rollback
            while published and published[-1] != move.to_build:
                published.pop()
    known = set(session.scalars(select(Build.id).where(Build.id.in_(published))))
    for build_id in reversed(published[:-1]):
        if build_id in known and build_id != release.build_id:
            return build_id
    raise CatalogueError(
        f"the release {release.name} has no build before build {release.build_id}: nothing to roll back to"
    )


def _move(session: Session, release: Release, build_id: int, action: str) -> None:
    """Point a locked release at a build and record the move."""
    move = ReleaseMove(release=release.name, from_build=release.build_id, to_build=build_id, action=action)
    session.add(move)
    release.build_id = build_id
    release.moved_at = func.now()
    session.flush()
    session.refresh(release)
    announce(session, release.name)


def _require_finished(build: Build) -> None:
    if build.state != "finished":
        reason = f": {build.error}" if build.error else ""
        raise CatalogueError(
            f"build {build.id} is {build.state}{reason}; only finished builds can be published"
        )


def _require_whole(build: Build, verify: Verify) -> None:
    problems = verify(build)
    if problems:
        more = f" (and {counted(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        raise CatalogueError(f"build {build.id} does not verify: {problems[0]}{more}")
