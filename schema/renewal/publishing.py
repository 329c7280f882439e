"""Releases move to new builds, and say what else must be renewed."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from draftstore.live import log
from draftstore.live.source import identified
from draftstore.text.digests import answer_digest
from schema.catalogue import pruning
from schema.catalogue.builds import CatalogueError
from schema.catalogue.gates import replay_rows
from schema.catalogue.lineage import source_places, store_digests
from schema.catalogue.releases import is_rolled_back
from schema.collections import proving
from schema.collections.collecting import list_collections, releases_of
from schema.collections.live_logs import forget, live_logs
from schema.db.embedded import data_home
from schema.models import Release
from schema.renewal.ledger import Built, Ledger
from schema.renewal.making import is_demonstration
from schema.renewal.survey import Survey


def publish(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> None:
    """Point a release at a build, unless it already points there; log what the gates measured."""
    if is_demonstration(built.manifest.corpus.get("sources", [])):
        require_free(ledger, release)
    moved = proving.publish(ledger.session, release, built.build_id, force=force)
    for sentence in moved.verdict.sentences():
        ledger.logger.warning("release %s: %s", release, sentence)
    for row in replay_rows(moved.build, moved.live):
        ledger.logger.info("%(recording)s: accepted length %(accepted_length).3f with build %(build)d", row)
    ledger.logger.info("the release %s points at build %d", release, built.build_id)
    require_renewed(ledger, [release], force)


def stays_rolled_back(ledger: Ledger, release: str, built: Built) -> bool:
    """Return True if a release was rolled back from a build to one without removed documents, and say so."""
    with ledger.session() as session:
        rolled_back = is_rolled_back(session, release, built.build_id)
    if not rolled_back or holds_removed(ledger, release):
        return False
    ledger.logger.warning(
        "release %s was rolled back from build %d and stays until the sources change: "
        "`draftstore releases publish %s %d` moves it", release, built.build_id, release, built.build_id,
    )  # fmt: skip
    return True


def require_free(ledger: Ledger, release: str) -> None:
    """Refuse to publish the demonstration corpus as a release of other texts or of a collection."""
    with ledger.session() as session:
        collections = [each.name for each in list_collections(session) if release in releases_of(each.name)]
        owners = [f"the collection {name}" for name in collections]
        live = session.get(Release, release)
        if live is not None and not is_demonstration(source_places(live.build)):
            owners.append(f"build {live.build_id} ({live.build.kind} {live.build.name!r})")
    if owners:
        raise CatalogueError(
            f"the release {release} belongs to {owners[0]}, but this is a build of the demonstration corpus: name your "
            "own texts (parameter corpus), or another release"
        )


def require_kind(ledger: Ledger, release: str, kind: str) -> None:
    """Refuse a store of another kind than the live one before it is built; `publish` checks the rest."""
    with ledger.session() as session:
        live = session.get(Release, release)
        expected = live.build.kind if live else kind
    if expected != kind:
        raise CatalogueError(
            f"the release {release} points at a {expected} store, and this flow builds a {kind} store: set the "
            'parameter release to another name, or force to ["kind", "strategy"]'
        )


def holds_removed(ledger: Ledger, release: str) -> str | None:
    """Say which removed documents the live build of a release holds, if it holds any."""
    with ledger.session() as session:
        live = session.get(Release, release)
        reason = proving.find_removed(session, live.build)[0] if live else ""
        return f"build {live.build_id}: {reason}" if live and reason else None


def require_renewed(ledger: Ledger, releases: Iterable[str], force: Sequence[str]) -> None:
    """Fail if a run leaves a release at a build that holds removed documents, unless `force` names that check."""
    for release in releases if "removed" not in force else ():
        if reason := holds_removed(ledger, release):
            raise CatalogueError(
                f"the release {release} stays at {reason}: renew that store as well (`rebuild` with `distilling` and "
                f"`dense`), remove the documents from its own collection, too (`draftstore corpus remove`), or "
                f"`draftstore releases remove {release}`"
            )


def prune(ledger: Ledger, keep: int) -> None:
    """Remove all but `keep` builds of each kind and name, and the leftovers of killed ones."""
    found = pruning.prune(ledger.session, data_home(), keep)
    for removal in found.removed:
        ledger.logger.info("removed: %s %s, %s bytes", removal.what, removal.path, f"{removal.bytes:,}")
    for path in found.in_use:
        ledger.logger.info("in use, kept: %s", path)


def put_to_rest(ledger: Ledger, surveyed: Survey) -> dict[str, int]:
    """Clear removed documents from live logs and those of the live build from memory; delete unwanted segments.

    Return how many segments were put to `rest` and how many were `deleted`.
    """
    collection, tokenizer = surveyed.collection, surveyed.tokenizer
    forget(collection, surveyed.scan)
    with ledger.session() as session:
        release = session.get(Release, collection.name)
        held = None if release is None else store_digests(Path(release.build.path))
    published = set() if held is None else set(map(bytes, held))
    unwanted = set(map(bytes, surveyed.scan.digests)) - set(map(bytes, surveyed.contents.digests))
    unwanted.add(answer_digest(""))

    def is_in(digests: set[bytes], document: log.LiveDocument) -> bool:
        return identified(document, tokenizer).digest in digests

    counts = {"rest": 0, "deleted": 0}
    for folder in live_logs(collection):
        counts["rest"] += log.put_to_rest(folder, partial(is_in, published | unwanted))
        counts["deleted"] += log.drop_rested(folder, partial(is_in, unwanted))
    return counts
