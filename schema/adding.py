"""Statistics of a store that was built elsewhere, loaded into the tables that SQL queries use."""

from pathlib import Path

from draftstore.storage.manifest import load_manifest
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.entries import open_entries
from draftstore.stores.crest.store import KIND as CREST
from schema.crest_loading import tree_reader
from schema.database import connect
from schema.failures import database_errors
from schema.partitions import partition_name
from schema.statistics import HEAD, Progress, load_counts, load_kept

TABLES = {NGRAMS: "ngrams", CREST: "kept_ngrams"}


def has_statistics(build_id: int, kind: str) -> bool:
    """Return True if the tables of a build are filled, or its kind has none."""
    if kind not in TABLES:
        return True
    partition = partition_name(TABLES[kind], build_id)
    with connect() as connection, database_errors():
        row = connection.execute("SELECT to_regclass(%s)", (partition,)).fetchone()
    return row is not None and row[0] is not None


def load_statistics(build_id: int, path: Path, *, head: int = HEAD, progress: Progress) -> None:
    """Load the SQL statistics of a store: the n-gram counts, or the n-grams of a CREST store.

    Args:
        build_id: id of the build.
        path: directory of the store.
        head: number of n-grams of each n that get a row, the most common ones.
        progress: called with the rows loaded and the total.

    Raises:
        StoreError: the store is damaged.
        DatabaseError: the database is down or refuses.
    """
    manifest = load_manifest(path)
    if manifest.kind == NGRAMS:
        with connect() as connection, database_errors():
            load_counts(connection, build_id, path, head=head, progress=progress)
    elif manifest.kind == CREST:
        entries = open_entries(path, manifest)
        try:
            tree_of = tree_reader(path, manifest, entries)
            with connect() as connection, database_errors():
                load_kept(connection, build_id, path, tree_of=tree_of, progress=progress)
        finally:
            entries.close()
