"""What is wrong with an installation, and what is merely left over: the checks of `draftstore doctor`."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError, EarlierVersionError
from draftstore.text.scans import open_scan
from draftstore.text.sources import GLOB_SIGNS
from schema.catalogue.builds import CatalogueError, fail_cut_off, get_build, storable
from schema.catalogue.gates import Candidate
from schema.catalogue.pruning import prune
from schema.catalogue.publishing import Transaction, Verify, verify_present
from schema.catalogue.releases import build_before, list_releases
from schema.collections.collecting import list_collections
from schema.collections.removal_files import scan_path
from schema.models import Build, Release

ALL = 1 << 30
"""More builds than there can be."""


class Finding(NamedTuple):
    """Something to report to the user.

    Attributes:
        problem: whether something does not work; otherwise it wastes space or can be resumed.
        what: description of the finding.
        advice: what to do.
    """

    problem: bool
    what: str
    advice: str


def examine(transaction: Transaction, home: Path, verify: Verify = verify_present) -> list[Finding]:
    """Examine releases, builds, collections, and leftovers of killed work.

    Builds whose process is gone are marked as failed, as the next flow would do.

    Args:
        transaction: begins a transaction in the catalogue.
        home: data folder of the flows.
        verify: returns the problems of a store.

    Raises:
        DatabaseError: the catalogue cannot be used.
    """
    with transaction() as session:
        cut_off = fail_cut_off(session)
        releases = list_releases(session)
        live = {release.name: Candidate.of(release.build) for release in releases}
        mends = {release.name: _mend(session, release) for release in releases}
    found = [
        Finding(False, f"build {build} was cut off", "run its flow again: it resumes") for build in cut_off
    ]
    found += _release_findings(live, mends, verify)
    with transaction() as session:
        found += _build_findings(session, {build.id for build in live.values()})
        found += _unknown_folders(session, home / "stores")
        found += _collection_findings(session)
    for removal in prune(transaction, home, ALL, dry_run=True).removed:
        what = f"{removal.what} {removal.path} is left over, {removal.bytes:,} bytes"
        found.append(Finding(False, what, "remove it: draftstore catalogue prune --keep 3"))
    return found


def _mend(session: Session, release: Release) -> str:
    """Return what to do if the live store of a release is damaged."""
    with suppress(CatalogueError):  # nothing to roll back to
        before = Candidate.of(get_build(session, build_before(session, release)))
        if not verify_present(before):
            return f"roll back to build {before.id}: draftstore releases rollback {release.name}"
    return f"rebuild it and publish the new build: draftstore releases publish {release.name} BUILD"


def _release_findings(live: dict[str, Candidate], mends: dict[str, str], verify: Verify) -> list[Finding]:
    """Return what is wrong with live stores."""
    return [
        Finding(True, f"release {name}, build {build.id}: {problem}", mends[name])
        for name, build in live.items()
        for problem in verify(build)
    ]


def _build_findings(session: Session, live: set[int]) -> Iterator[Finding]:
    """Yield builds whose files are gone."""
    finished = session.scalars(select(Build).filter_by(state="finished").order_by(Build.id))
    for build in finished:
        if build.id not in live and not Path(build.path).exists():
            what = f"build {build.id} is registered, but {build.path} is gone"
            yield Finding(False, what, f"drop it: draftstore catalogue drop {build.id}")


def _unknown_folders(session: Session, stores: Path) -> Iterator[Finding]:
    """Yield folders among the stores of flows that belong to no build, such as the remains of a removed store."""
    known = set(session.scalars(select(Build.path)))
    for folder in sorted(stores.resolve().glob("*/[!.]*")):
        if storable(str(folder)) not in known:
            advice = f"register it (draftstore catalogue add {folder}), or remove it"
            yield Finding(False, f"{folder} belongs to no build", advice)


def _collection_findings(session: Session) -> Iterator[Finding]:
    """Yield collections that the next rebuild cannot read."""
    for collection in list_collections(session):
        try:
            open_scan(scan_path(collection.name))
        except DraftstoreError as error:
            earlier = isinstance(error, EarlierVersionError)
            advice = (
                "begin the collection again: docs/operations.md, Upgrade" if earlier else "remove that file"
            )
            yield Finding(True, f"collection {collection.name}: {error}", advice)
        for source in collection.sources:
            is_path = source.kind == "files" and not GLOB_SIGNS.search(source.place)
            if is_path and not Path(source.place).exists():
                what = f"collection {collection.name}: {source.place} is missing"
                yield Finding(
                    True, what, "restore it, or define the collection again: draftstore corpus drop"
                )
