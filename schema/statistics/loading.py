"""Loading stores into the database: a CREST store in one transaction, and statistics of any store."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import select
from sqlalchemy.orm import Session

from draftstore.errors import StoreError
from draftstore.storage.manifest import Manifest, load_manifest, manifest_digest
from draftstore.storage.report import OnProgress, ignore
from draftstore.stores.crest.counts import KIND as NGRAMS
from draftstore.stores.crest.entries import Entries, entries_digest
from draftstore.stores.crest.store import KIND as CREST
from schema.catalogue.builds import add_build, fail_cut_off
from schema.db.database import connect, make_engine
from schema.db.errors import database_errors
from schema.db.partitions import copy_statement, filling, loading, partition_name
from schema.models import Build
from schema.statistics.ngrams import HEAD, fill_kept, load_counts, store_tokenizer

TABLES = {NGRAMS: "ngrams", CREST: "kept_ngrams"}
COLUMNS = ("build_id", "key", "value")
TYPES = ("int8", "bytea", "bytea")
PROGRESS_ROWS = 1 << 14

Entry = tuple[bytes, bytes]


def load(path: Path, out: Path, manifest: Manifest, source: Entries, progress: OnProgress) -> None:
    """Implement `schema.trees.load_store`."""
    entries = manifest.counts["entries"]
    tokenizer = store_tokenizer(path, manifest)
    engine = make_engine()
    try:
        with database_errors(), Session(engine) as session, session.begin():
            build_id = _build_to_fill(session, path, out)
            connection = session.connection().connection.driver_connection
            assert isinstance(connection, psycopg.Connection)
            with loading(connection, build_id):
                fill_trees(
                    connection,
                    build_id,
                    source.items(),
                    manifest.parameters["entries_sha256"],
                    lambda done, _total, _detail="": progress(done, 2 * entries),
                )
                fill_kept(
                    connection,
                    build_id,
                    path,
                    tokenizer,
                    progress=lambda done, _total, _detail="": progress(entries + done, 2 * entries),
                )
    finally:
        engine.dispose()


def _build_to_fill(session: Session, path: Path, out: Path) -> int:
    """Return the build that a store's trees belong to, registering it if necessary."""
    place = str(out.parent.resolve() / out.name)
    fail_cut_off(session)
    same_place = select(Build).filter_by(kind="crest", path=place).order_by(Build.id.desc()).limit(1)
    build = (
        session.scalars(same_place.filter_by(state="running")).first()
        or session.scalars(same_place.filter_by(state="finished", digest=manifest_digest(path))).first()
    )
    if build is None:
        build = add_build(session, path)
        build.path = place
        session.flush()
    return build.id


def fill_trees(
    connection: psycopg.Connection[Any],
    build_id: int,
    entries: Iterable[Entry],
    expected: str,
    progress: OnProgress = ignore,
) -> None:
    """Replace the tree entries of a build, inside `loading`; raise StoreError unless their digest is `expected`.

    Entries arrive one by one, so psycopg's row writer is faster than frames.
    """
    done = 0

    def sent(copy: psycopg.Copy) -> Iterator[Entry]:
        nonlocal done
        copy.set_types(TYPES)
        for done, (key, value) in enumerate(entries, start=1):
            copy.write_row((build_id, key, value))
            yield key, value
            if done % PROGRESS_ROWS == 0:
                progress(done, None)

    with filling(connection, "trees", build_id) as table:
        statement = copy_statement(table, COLUMNS, "binary", freeze=True)
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            found = entries_digest(sent(copy))
        if found != expected:
            raise StoreError(
                f"the {done:,} entries have SHA-256 {found}, the manifest says {expected}: the store is damaged, "
                "build it again"
            )
    progress(done, None)


def has_statistics(build_id: int, kind: str) -> bool:
    """Return True if the tables of a build are filled, or its kind has none."""
    if kind not in TABLES:
        return True
    partition = partition_name(TABLES[kind], build_id)
    with connect() as connection, database_errors():
        row = connection.execute("SELECT to_regclass(%s)", (partition,)).fetchone()
    return row is not None and row[0] is not None


def load_statistics(build_id: int, path: Path, *, head: int = HEAD, progress: OnProgress) -> None:
    """Load the SQL statistics of a store: the n-gram counts, or the n-grams of a CREST store.

    Args:
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
        tokenizer = store_tokenizer(path, manifest)
        with connect() as connection, database_errors(), loading(connection, build_id):
            fill_kept(connection, build_id, path, tokenizer, progress=progress)
