"""The proof that removed documents are gone: builds are immutable and record the digests of their documents.

A live build made from the collection may hold only wanted documents; any other one no removed document. What cannot be
compared is proven only if somebody vouched for it since the last removal.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from draftstore.errors import DraftstoreError
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.text.digests import digest_keys, stack_digests
from draftstore.text.scans import Scan
from schema.catalogue import CatalogueError
from schema.catalogue.lineage import descends_from, document_keys
from schema.collections.collecting import wanted_of
from schema.collections.live_logs import live_logs, removed_digests
from schema.collections.models import Collection
from schema.models import Build, Release


class Checked(NamedTuple):
    """A live build compared with the documents of a collection.

    Attributes:
        releases: names of the releases that point at it.
        documents: number of its documents, if known.
        removed: how many of them were removed from the collection.
        unwanted: how many others the collection does not want, if the build was made from it.
        problem: why the build could not be checked; None if it was.
        vouched: when somebody vouched for a build that could not be checked; None: nobody since the last removal.
    """

    build: int
    kind: str
    releases: list[str]
    documents: int = 0
    removed: int = 0
    unwanted: int = 0
    problem: str | None = None
    vouched: str | None = None

    @property
    def clean(self) -> bool:
        """Whether it holds only wanted documents."""
        return not self.removed and not self.unwanted and (self.problem is None or self.vouched is not None)


def removed_keys(collection: Collection, scan: Scan | None) -> NDArray[np.bytes_]:
    """Return the digests by which builds may have removed documents, S16 [n]: their own, of texts, of live answers."""
    return digest_keys(stack_digests(frozenset[bytes]().union(*removed_digests(collection, scan).values())))


def vouch(session: Session, collection: Collection, things: Iterable[str]) -> None:
    """Record that somebody vouches for live builds (ids) and live logs (folders); CatalogueError if one is not live."""
    now = session.scalars(select(func.clock_timestamp())).one().isoformat()
    live = {str(build.id) for build, _ in _live_builds(session)} | set(map(str, live_logs(collection)))
    for thing in things:
        found = live & {thing, os.path.abspath(thing)}  # noqa: PTH100 (links may move on purpose)
        if not found:
            raise CatalogueError(
                f"{thing} is neither the id of a live build nor a live log of {collection.name}: nothing to vouch for"
            )
        collection.vouched = collection.vouched | dict.fromkeys(found, now)


def check_live_builds(
    session: Session, collection: Collection, scan: Scan, removed: NDArray[np.bytes_]
) -> list[Checked]:
    """Compare the documents of all live builds with those of a collection.

    Args:
        scan: a current scan: what the builds should have been made from.
        removed: S16 [n], see `removed_keys`.
    """
    wanted = digest_keys(wanted_of(collection, scan))
    checked = []
    for build, releases in _live_builds(session):
        row = Checked(build.id, build.kind, releases)
        try:
            keys = document_keys(session, build)
        except (DraftstoreError, OSError) as error:
            advice = f"build it again from the collection, publish another build, or vouch for it: `--vouch {build.id}`"
            row = row._replace(problem=f"{error}; {advice}", vouched=collection.vouched_for(build.id))
        else:
            gone = int(np.isin(keys, removed).sum())
            ours = descends_from(build, collection.name)
            others = int((~np.isin(keys, wanted)).sum()) - gone if ours else 0
            row = row._replace(documents=len(keys), removed=gone, unwanted=others)
        checked.append(row)
    return checked


def _live_builds(session: Session) -> Iterator[tuple[Build, list[str]]]:
    """Yield the builds of all releases, and the newest n-gram counts of each name, which SQL reads."""
    live: defaultdict[int, list[str]] = defaultdict(list)
    for release in session.scalars(select(Release).order_by(Release.name)):
        live[release.build_id].append(release.name)
    counts = select(func.max(Build.id)).filter_by(kind=NGRAMS, state="finished").group_by(Build.name)
    found = select(Build).where(Build.id.in_(live) | Build.id.in_(counts)).order_by(Build.id)
    for build in session.scalars(found):
        yield build, live[build.id]
