"""The last steps of the flows: releases move to what was built, and old builds are removed."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftstore.errors import counted
from pipelines.corpora import demonstration_path
from pipelines.ledger import Ledger
from pipelines.reports import Built
from schema import catalogue
from schema.home import data_home
from schema.releases import list_releases


def prune(ledger: Ledger, keep: int) -> list[str]:
    """Remove all but `keep` builds of each kind and name, and what killed ones left; return a sentence about it."""
    found = catalogue.prune(ledger.session, data_home(), keep)
    for removal in found.removed:
        ledger.logger.info("removed: %s %s, %s bytes", removal.what, removal.path, f"{removal.bytes:,}")
    for path in found.in_use:
        ledger.logger.info("in use, stays: %s", path)
    return (
        [f"Removed {counted(len(found.removed), 'old thing')}, {found.bytes:,} bytes"]
        if found.removed
        else []
    )


def require_free(ledger: Ledger, release: str) -> None:
    """Refuse a release to the demonstration corpus, unless it is new or already points at that corpus.

    Raises:
        CatalogueError: another corpus holds the release.
    """
    with ledger.session() as session:
        live = {each.name: each.build for each in list_releases(session)}.get(release)
        corpus = [] if live is None else _sources(live.manifest)
        if live is not None and not _is_demonstration(corpus):
            raise catalogue.CatalogueError(
                f"the demonstration corpus does not replace the release {release}, which build {live.id} holds "
                f"({live.kind} {live.name!r} from {', '.join(corpus[:3]) or 'other texts'}): name your own texts "
                "(--param corpus=... --param name=NAME), or another release (--param release=NAME)"
            )


def _sources(manifest: Mapping[str, Any] | None) -> list[str]:
    return list((manifest or {}).get("corpus", {}).get("sources", []))


def _is_demonstration(sources: Sequence[str]) -> bool:
    return list(sources) == [str(demonstration_path(data_home()))]


def publish(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> catalogue.Moved:
    """Point a release at a verified build, unless it already points there; return what the gates measured.

    Raises:
        CatalogueError: the store fails verification, or its corpus is the demonstration and another one holds the
            release.
        RefusedError: the build is too different from the live one, or does worse.
        DatabaseError: the database cannot be used.
    """
    if _is_demonstration(built.manifest.corpus.get("sources", [])):
        require_free(ledger, release)
    try:
        moved = catalogue.publish(ledger.session, release, built.build_id, force=force)
    except catalogue.RefusedError as refused:
        ledger.logger.error("%s", refused)  # noqa: TRY400 - a sentence for people, not a fault of the program
        raise
    for sentence in moved.verdict.sentences():
        ledger.logger.warning("release %s: %s", release, sentence)
    ledger.logger.info("the release %s points at build %d", release, built.build_id)
    return moved
