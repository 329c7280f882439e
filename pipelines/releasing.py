"""The last steps of the flows: releases move to what was built, and old builds are removed."""

from collections.abc import Sequence

from draftstore.errors import counted
from pipelines.corpora import demo_path
from pipelines.ledger import Ledger
from pipelines.reports import Built
from schema import catalogue
from schema.collecting import list_collections, releases_of
from schema.home import data_home
from schema.lineage import source_places
from schema.models import Release


def prune(ledger: Ledger, keep: int) -> list[str]:
    """Remove old builds of the flows, and what killed ones left.

    Args:
        ledger: ledger of this run.
        keep: number of finished builds of each kind and name that stay.

    Returns:
        A sentence that says what was removed; empty if there was nothing.

    Raises:
        DatabaseError: the database cannot be used.
        OSError: files cannot be removed.
    """
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


def publish(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> list[str]:
    """Point a release at a verified build, unless it already points there.

    Args:
        ledger: ledger of this run.
        release: name of the release.
        built: the build.
        force: names of checks to override.

    Returns:
        One sentence for each check that was overridden or could not be made.

    Raises:
        CatalogueError: the store fails verification, or is a demonstration and the release is not.
        RefusedError: the build is too different from the live one, or does worse.
        DatabaseError: the database cannot be used.
    """
    return move(ledger, release, built, force).verdict.sentences()


def move(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> catalogue.Moved:
    """Point a release at a verified build, and return what the gates measured and said; see `publish`."""
    _keep_demo_apart(ledger, release, built)
    try:
        moved = catalogue.publish(ledger.session, release, built.build_id, force=force)
    except catalogue.RefusedError as refused:
        ledger.logger.error("%s", refused)  # noqa: TRY400 - a sentence for people, not a fault of the program
        raise
    for sentence in moved.verdict.sentences():
        ledger.logger.warning("release %s: %s", release, sentence)
    ledger.logger.info("the release %s points at build %d", release, built.build_id)
    return moved


def _keep_demo_apart(ledger: Ledger, release: str, built: Built) -> None:
    """Refuse a build of the demonstration corpus where anything else has the name of its release.

    Raises:
        CatalogueError: a build of other texts, or a collection, has it.
    """
    demo = [str(demo_path(data_home()))]
    if built.manifest.corpus.get("sources") != demo:
        return
    with ledger.session() as session:
        collections = [each.name for each in list_collections(session) if release in releases_of(each.name)]
        owners = [f"the collection {name}" for name in collections]
        live = session.get(Release, release)
        if live is not None and source_places(live.build)[:1] != demo:
            owners.append(f"build {live.build_id}")
    if owners:
        raise catalogue.CatalogueError(
            f"the release {release} is that of {owners[0]}, and this is a build of the demonstration corpus: name your "
            "own texts (parameter corpus), or another release"
        )
