"""What is wrong with an installation, and what is left over: `draftstore catalogue list --check`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select

from draftstore.errors import CorpusError
from draftstore.text.corpus import GLOB_SIGNS
from draftstore.text.scans import open_scan
from schema.catalogue.builds import storable
from schema.catalogue.gates import Candidate
from schema.catalogue.pruning import prune
from schema.catalogue.publishing import Transaction, Verify
from schema.catalogue.releases import list_releases
from schema.collections.collecting import list_collections
from schema.collections.models import Collection
from schema.collections.removal_files import scan_path
from schema.models import Build

ALL = 1 << 30
"""More builds than there can be."""


class Finding(NamedTuple):
    """Something to report, and what to do; `problem`: something does not work, else it wastes space."""

    problem: bool
    what: str
    advice: str


def examine(transaction: Transaction, home: Path, verify: Verify) -> Iterator[Finding]:
    """Examine live stores with `verify`, other builds, folders in `home`, collections, and leftovers of builds."""
    with transaction() as session:  # none is open while stores are read
        live = {release.name: Candidate.of(release.build) for release in list_releases(session)}
        builds = session.execute(select(Build.id, Build.state, Build.path).order_by(Build.id)).all()
        collections = list_collections(session)
    for name, build in live.items():
        advice = f"draftstore releases rollback {name}, or releases publish {name} BUILD of another build"
        for problem in verify(build):
            yield Finding(True, f"release {name}, build {build.id}: {problem}", advice)
    released = {build.id for build in live.values()}
    for number, state, path in builds:
        if state == "finished" and number not in released and not Path(path).exists():
            what = f"build {number} is registered, but {path} is gone"
            yield Finding(False, what, f"drop it: draftstore catalogue drop {number}")
    known = {path for _, _, path in builds}
    for folder in sorted((home / "stores").resolve().glob("*/[!.]*")):
        if storable(str(folder)) not in known:
            advice = f"register it (draftstore catalogue add {folder}), or remove it"
            yield Finding(False, f"{folder} belongs to no build", advice)
    for collection in collections:
        yield from _examine_collection(collection)
    for removal in prune(transaction, home, ALL, dry_run=True).removed:
        what = f"{removal.what} {removal.path} is left over, {removal.bytes:,} bytes"
        yield Finding(False, what, "remove it: draftstore catalogue prune --keep 3")


def _examine_collection(collection: Collection) -> Iterator[Finding]:
    try:
        open_scan(scan_path(collection.name))
    except CorpusError as error:
        advice = "remove that file; one of an earlier version: docs/operations.md, Upgrade"
        yield Finding(True, f"collection {collection.name}: {error}", advice)
    for source in collection.sources:
        if source.kind == "files" and not GLOB_SIGNS.search(source.place) and not Path(source.place).exists():
            what = f"collection {collection.name}: {source.place} is missing"
            yield Finding(True, what, "restore it, or define the collection again: draftstore corpus drop")
