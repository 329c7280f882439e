"""The last steps of the flows: releases move to what was built, and old builds are removed."""

from collections.abc import Sequence
from pathlib import Path

from draftstore.errors import counted
from pipelines.corpora import DEMO_FILE
from pipelines.ledger import Ledger
from pipelines.reports import Built
from schema import catalogue
from schema.collecting import list_collections, releases_of
from schema.home import data_home
from schema.lineage import source_places
from schema.models import Release


def prune(ledger: Ledger, keep: int) -> list[str]:
    """Remove all but `keep` builds of each kind and name, and what killed ones left; return a sentence about it."""
    found = catalogue.prune(ledger.session, data_home(), keep)
    for removal in found.removed:
        ledger.logger.info("removed: %s %s, %s bytes", removal.what, removal.path, f"{removal.bytes:,}")
    for path in found.in_use:
        ledger.logger.info("in use, stays: %s", path)
    if not found.removed:
        return []
    return [f"Removed {counted(len(found.removed), 'old thing')}, {found.bytes:,} bytes"]


def require_free(ledger: Ledger, release: str) -> None:
    """Refuse a release to the demonstration corpus where a build of other texts, or a collection, has it."""
    with ledger.session() as session:
        collections = [each.name for each in list_collections(session) if release in releases_of(each.name)]
        owners = [f"the collection {name}" for name in collections]
        live = session.get(Release, release)
        if live is not None and not _is_demonstration(source_places(live.build)):
            owners.append(f"build {live.build_id} ({live.build.kind} {live.build.name!r})")
    if owners:
        raise catalogue.CatalogueError(
            f"the release {release} is that of {owners[0]}, and this is a build of the demonstration corpus: name your "
            "own texts (parameter corpus), or another release"
        )


def _is_demonstration(sources: Sequence[str]) -> bool:
    """Return True for the corpus alone, in whatever data folder it was collected."""
    return {Path(source).name for source in sources} == {DEMO_FILE}


def publish(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> catalogue.Moved:
    """Point a release at a verified build, unless it already points there; return what the gates measured.

    Raises:
        CatalogueError: the store fails verification, or is a demonstration and the release is not.
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
