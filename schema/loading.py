"""Filling a build's partitions, all or nothing: one transaction makes, fills, indexes and attaches them.

Readers see what was there before until the last moment, and a load that fails or is killed leaves nothing behind, not
even tables to clean up: PostgreSQL undoes the transaction. Since the tables are new in it, their rows are also written
as if vacuumed (FREEZE), so that the first reader does not write them all again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from draftstore.errors import BuildError
from schema.database import database_errors
from schema.partitions import attach_partition, create_partition, drop_partition, partition_name

SETTINGS = {
    "statement_timeout": "0",  # a large COPY may take minutes
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "60s",  # of the swap alone: for so long it waits for readers of what it replaces
    "maintenance_work_mem": "256MB",  # indexes are sorted in memory
}
LOAD_LOCK_TIMEOUT = "3s"


@contextmanager
def loading(connection: psycopg.Connection[Any], build_id: int) -> Iterator[None]:
    """Hold a transaction in which a build's tables are filled; it is committed at the end of the block.

    Args:
        connection: no transaction is under way on it.
        build_id: a row of `builds`, which cannot be deleted meanwhile.

    Raises:
        BuildError: no such build, or another load of it is at work.
        DatabaseError: the server went away, is full, or readers of the old partition did not let go of it.
    """
    with database_errors(), connection.transaction():
        _lock(connection, build_id)
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        if not connection.execute("SELECT 1 FROM builds WHERE id = %s FOR KEY SHARE", (build_id,)).fetchone():
            raise BuildError(f"the catalogue has no build {build_id}: register it before loading it")
        yield


def _lock(connection: psycopg.Connection[Any], build_id: int) -> None:
    """Keep other loads of a build away; one whose process has just been killed may take a moment to end."""
    connection.execute("SELECT set_config('lock_timeout', %s, true)", (LOAD_LOCK_TIMEOUT,))
    try:
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"draftstore load {build_id:d}",)
        )
    except psycopg.errors.LockNotAvailable:
        raise BuildError(
            f"build {build_id} is being loaded by another process: wait until that is done"
        ) from None


@contextmanager
def filling(connection: psycopg.Connection[Any], table: str, build_id: int) -> Iterator[str]:
    """Make a table to fill, inside `loading`; at the end of the block it takes the place of the build's partition.

    Args:
        connection: where.
        table: a partitioned table.
        build_id: the build.

    Yields:
        The name of the table to fill, without key and indexes.
    """
    name = partition_name(table, build_id)
    filled = f"{name}_new"
    _run(connection, create_partition(table, build_id, filled))
    yield filled
    # From here on readers of an earlier partition wait.
    _run(connection, drop_partition(table, build_id))
    _run(connection, f"ALTER TABLE {filled} RENAME TO {name}")
    for statement in attach_partition(table, build_id):
        _run(connection, statement)


def _run(connection: psycopg.Connection[Any], statement: str) -> None:
    """Run a statement made of names and numbers of our own."""
    connection.execute(statement.encode())
