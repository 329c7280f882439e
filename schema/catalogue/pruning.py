"""Pruning: removal of old builds of flows, with their files and tables, and of the folders of killed builds.

A flow's build is in `DRAFTSTORE_HOME/stores/NAME/KIND-FINGERPRINT`; nothing else is ever touched. These stay: the
newest builds of each kind and name, builds that a release points at or would be rolled back to, stores that a process
has open (`draftstore.storage.locks`), sources of live and running builds, and unfinished builds that may be resumed.

A build is marked before its files are removed and leaves the catalogue last, so that the next pruning continues a
killed one.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import StoreError
from draftstore.storage.files import remove
from draftstore.storage.locks import exclusive
from draftstore.storage.staging import remove_store
from schema.catalogue.builds import CatalogueError, digest_at, drop_build, fail_cut_off, get_build
from schema.catalogue.publishing import Transaction
from schema.catalogue.releases import build_before, list_releases
from schema.models import KINDS, Build, Release

STORE_NAME = re.compile(f"({'|'.join(KINDS)})-[0-9a-f]{{16}}")
"""Name of a directory that a flow builds (`schema.renewal.making.store_path`)."""
UNFINISHED = re.compile(rf"\.({STORE_NAME.pattern})\.partial")
"""Name of a folder that a build works in or has replaced."""
PRUNED = "pruned: its files are being removed"


class Pruned(NamedTuple):
    """A removed item: `store` (a build), or `unfinished` (a folder of a killed build that no longer has a row)."""

    what: str
    build_id: int | None
    path: str
    bytes: int


class Pruning(NamedTuple):
    """The items removed, or to be removed, and the stores that stay because a process has them open."""

    removed: list[Pruned]
    in_use: list[str]

    @property
    def bytes(self) -> int:
        """Size of everything that was removed."""
        return sum(each.bytes for each in self.removed)


class _Old(NamedTuple):
    """A build to remove."""

    id: int
    path: Path
    digest: str | None
    state: str
    bytes: int


def prune(
    transaction: Transaction,
    home: Path,
    keep: int,
    *,
    older_than: timedelta = timedelta(0),
    dry_run: bool = False,
) -> Pruning:
    """Remove old builds of flows, all but the newest `keep` of each kind and name, and leftovers."""
    stores, before = (home / "stores").resolve(), datetime.now(UTC) - older_than
    with transaction() as session:
        fail_cut_off(session)
        old = _old_builds(session, stores, keep, before)
        resumed = Build.state != "finished", Build.id.not_in([build.id for build in old])
        resumable = set(map(Path, session.scalars(select(Build.path).where(*resumed))))
    found = Pruning([], [])
    for build in old:
        with exclusive(build.path) as free:
            in_use = build.digest is not None and not free
        try:
            if in_use:
                found.in_use.append(str(build.path))
            elif dry_run or _remove_build(transaction, build):
                found.removed.append(Pruned("store", build.id, str(build.path), build.bytes))
        except StoreError:  # just opened: the next pruning continues
            found.in_use.append(str(build.path))
    for folder in _lost_folders(stores, resumable, before):
        with exclusive(folder) as free:
            if free:
                found.removed.append(Pruned("unfinished", None, str(folder), _size(folder)))
                if not dry_run:
                    remove(folder)
    if not dry_run:
        for folder in stores.glob("*/"):
            with suppress(OSError):  # not empty
                folder.rmdir()
    return found


def _old_builds(session: Session, stores: Path, keep: int, before: datetime) -> list[_Old]:
    """Return the builds to remove, oldest first; a killed one may have left a complete store without a digest."""
    kept = _used_builds(session)
    seen: dict[tuple[str, str], int] = {}
    old, held = [], set()
    for build in session.scalars(select(Build).order_by(Build.id.desc())):
        path = Path(build.path)
        if not _is_ours(path, stores):
            continue
        newer = seen.get((build.kind, build.name), 0)
        if build.state == "finished":
            seen[build.kind, build.name] = newer + 1
        too_many = build.state == "finished" and newer >= keep
        superseded = build.state == "failed" and (newer > 0 or build.error == PRUNED)
        is_old = (build.finished_at or build.started_at) <= before
        if (too_many or superseded) and is_old and build.id not in kept:
            old.append(_Old(build.id, path, build.digest, build.state, build.size_bytes or 0))
        else:
            held.add(path)
    return [
        each._replace(digest=digest_at(each.path)) if each.digest is None and each.path not in held else each
        for each in old[::-1]
    ]


def _used_builds(session: Session) -> set[int | None]:
    """Return the builds of releases, now or after a rollback, and the sources of live and running builds."""
    used = set(session.scalars(select(Build.source_id).filter_by(state="running")))
    for release in list_releases(session):
        used |= {release.build_id, release.build.source_id}
        with suppress(CatalogueError):  # nothing to roll back to
            used.add(build_before(session, release))
    return used


def _is_ours(path: Path, stores: Path) -> bool:
    return path.parent.parent == stores and bool(STORE_NAME.fullmatch(path.name)) and path.resolve() == path


def _remove_build(transaction: Transaction, build: _Old) -> bool:
    """Remove a build's files and tables; return False if it changed meanwhile."""
    with transaction() as session:
        row = get_build(session, build.id, lock=True)
        live = session.scalars(select(Release.name).filter_by(build_id=build.id)).first()
        if row.state != build.state or live:
            return False
        if row.state == "finished":
            row.state, row.error = "failed", PRUNED  # it can no longer be published
    if build.digest is not None and digest_at(build.path) == build.digest:
        remove_store(build.path)
    with transaction() as session:
        drop_build(session, build.id)
    return True


def _lost_folders(stores: Path, resumable: set[Path], before: datetime) -> Iterator[Path]:
    for folder in sorted(stores.glob("*/.*")):
        name = UNFINISHED.fullmatch(folder.name)
        if name is None or folder.is_symlink() or folder.parent.is_symlink() or not folder.is_dir():
            continue
        if folder.with_name(name[1]) not in resumable and _last_change(folder) <= before:
            yield folder


def _last_change(folder: Path) -> datetime:
    return datetime.fromtimestamp(max(path.lstat().st_mtime for path in (folder, *folder.rglob("*"))), UTC)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
