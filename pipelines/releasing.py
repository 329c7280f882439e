"""The last steps of the flows: releases move to what was built, and old builds are removed."""

from collections.abc import Sequence

from draftstore.errors import counted
from pipelines.ledger import Ledger
from pipelines.reports import Built
from schema import catalogue
from schema.home import data_home


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
        CatalogueError: the store fails verification.
        RefusedError: the build is too different from the live one, or does worse.
        DatabaseError: the database cannot be used.
    """
    return move(ledger, release, built, force).verdict.sentences()


def move(ledger: Ledger, release: str, built: Built, force: Sequence[str] = ()) -> catalogue.Moved:
    """Point a release at a verified build, and return what the gates measured and said; see `publish`."""
    try:
        moved = catalogue.publish(ledger.session, release, built.build_id, force=force)
    except catalogue.RefusedError as refused:
        ledger.logger.error("%s", refused)  # noqa: TRY400 - a sentence for people, not a fault of the program
        raise
    for sentence in moved.verdict.sentences():
        ledger.logger.warning("release %s: %s", release, sentence)
    ledger.logger.info("the release %s points at build %d", release, built.build_id)
    return moved
