"""The partitions of `ngrams`, `kept_ngrams` and `trees`: one per build, named `<table>_<build id>`.

A load is one transaction: it creates separate tables, fills them by COPY, and attaches them, which builds the parent's
keys and indexes over a full table in one go. Readers see the old content until the commit; those of other builds never
wait. A load that fails or is killed leaves nothing behind, not even tables to clean up. Since the tables are created in
the transaction, rows are written as already vacuumed (FREEZE), so that no reader needs to rewrite them.

    with loading(connection, 7), filling(connection, "trees", 7) as table:
        ...                                         # COPY table FROM STDIN WITH (FORMAT binary, FREEZE)
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import psycopg
from psycopg import sql

from draftstore.errors import BuildError
from schema.db.errors import database_errors
from schema.models import PARTITIONED

PARTITION_NAME = re.compile(f"({'|'.join(PARTITIONED)})_[0-9]+")


def partition_name(table: str, build_id: int) -> str:
    """Return the name of a build's partition: `trees_7`."""
    return f"{table}_{build_id:d}"


def create_partition(table: str, build_id: int, name: str | None = None) -> str:
    """Return the statement that creates an empty, detached table for a build, without primary key and indexes.

    It may have another name until it replaces a partition. Its constraint saves `attach_partition` a scan of all rows.
    """
    partition = partition_name(table, build_id)
    return (
        f"CREATE TABLE {name or partition} (LIKE {table} INCLUDING COMMENTS INCLUDING DEFAULTS INCLUDING STORAGE, "
        f"CONSTRAINT ck_{partition} CHECK (build_id = {build_id:d}))"
    )


def attach_partition(table: str, build_id: int) -> list[str]:
    """Return the statements that turn a filled table into a partition: primary key, indexes, statistics."""
    name = partition_name(table, build_id)
    return [
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES IN ({build_id:d})",
        f"ALTER TABLE {name} DROP CONSTRAINT ck_{name}",
        f"ANALYZE {name}",
    ]


def drop_partition(table: str, build_id: int) -> str:
    """Return the statement that drops a build's partition, attached or not, if it exists.

    It waits for open transactions that read the parent table, and new readers queue behind it: set a lock timeout.
    """
    return f"DROP TABLE IF EXISTS {partition_name(table, build_id)}"


SETTINGS = {
    "statement_timeout": "0",  # a large COPY may take minutes
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "60s",  # for the swap only: how long it waits for readers of the old partition
    "maintenance_work_mem": "256MB",  # for sorting indexes in memory
}
LOAD_LOCK_TIMEOUT = "3s"


@contextmanager
def loading(connection: psycopg.Connection[Any], build_id: int) -> Iterator[None]:
    """Run a transaction that fills a build's tables; BuildError if another process is loading it."""
    with database_errors(), connection.transaction():
        _lock(connection, build_id)
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        if not connection.execute("SELECT 1 FROM builds WHERE id = %s FOR KEY SHARE", (build_id,)).fetchone():
            raise BuildError(f"the catalogue has no build {build_id}: register it before loading it")
        yield


def _lock(connection: psycopg.Connection[Any], build_id: int) -> None:
    """Exclude other loads of a build, after waiting a moment for a killed one to end."""
    connection.execute("SELECT set_config('lock_timeout', %s, true)", (LOAD_LOCK_TIMEOUT,))
    try:
        connection.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"draftstore load {build_id:d}",)
        )
    except psycopg.errors.LockNotAvailable:
        raise BuildError(
            f"build {build_id} is being loaded by another process: wait until it is done"
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
    connection.execute(statement.encode())


def copy_statement(
    table: str, names: Sequence[str], form: Literal["csv", "binary"], *, freeze: bool = False
) -> sql.Composed:
    """Return the COPY statement for some columns of a table; `freeze` needs a table of this transaction."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {}, FREEZE {})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(form),
        sql.Literal(freeze),
    )
