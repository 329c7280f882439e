"""Filling a build's partitions atomically: one transaction creates, fills, indexes and attaches them.

Readers see the old content until the commit, and a load that fails or is killed leaves nothing behind, not even tables
to clean up: PostgreSQL rolls the transaction back. Since the tables are created in it, rows are written as already
vacuumed (FREEZE), so that the first reader need not rewrite them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from draftstore.errors import BuildError
from schema.failures import database_errors
from schema.partitions import attach_partition, create_partition, drop_partition, partition_name

SETTINGS = {
    "statement_timeout": "0",  # a large COPY may take minutes
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "60s",  # for the swap only: how long it waits for readers of the old partition
    "maintenance_work_mem": "256MB",  # for sorting indexes in memory
}
LOAD_LOCK_TIMEOUT = "3s"


@contextmanager
def loading(connection: psycopg.Connection[Any], build_id: int) -> Iterator[None]:
    """Run a transaction that fills a build's tables; committed at the end of the block.

    Raises:
        BuildError: no such build, or it is being loaded by another process.
        DatabaseError: the server went away, is full, or readers kept the old partition locked.
    """
    with database_errors(), connection.transaction():
        _lock(connection, build_id)
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        if not connection.execute("SELECT 1 FROM builds WHERE id = %s FOR KEY SHARE", (build_id,)).fetchone():
            raise BuildError(f"the catalogue has no build {build_id}: register it before loading it")
        yield


def _lock(connection: psycopg.Connection[Any], build_id: int) -> None:
    """Exclude other loads of a build; waits a moment for a killed one to end."""
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
    """Yield a table to fill, without key and indexes, inside `loading`; it then replaces the build's partition."""
    name = partition_name(table, build_id)
    filled = f"{name}_new"
    _run(connection, create_partition(table, build_id, filled))
    yield filled
    # From here on, readers of the old partition wait.
    _run(connection, drop_partition(table, build_id))
    _run(connection, f"ALTER TABLE {filled} RENAME TO {name}")
    for statement in attach_partition(table, build_id):
        _run(connection, statement)


def _run(connection: psycopg.Connection[Any], statement: str) -> None:
    """Run a statement composed of trusted names and numbers."""
    connection.execute(statement.encode())
