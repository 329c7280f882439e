"""The partitions of `ngrams`, `kept_ngrams` and `trees`: one a build, named `<table>_<build id>`.

A partition is made as a table of its own, filled by COPY, and then attached, all in one transaction. Readers of the
other partitions wait for nothing and see all of the new one or nothing. Attaching makes the key and the indexes of
the parent, in one go over the filled table; only another load that attaches at the same moment waits for it.

    BEGIN
    create_partition("trees", 7)
    COPY trees_7 FROM STDIN WITH (FORMAT binary, FREEZE)   -- FREEZE: no VACUUM needed before index-only scans
    attach_partition("trees", 7)
    COMMIT
"""

import re

from schema.models import PARTITIONED

PARTITION_NAME = re.compile(f"({'|'.join(PARTITIONED)})_[0-9]+")


def partition_name(table: str, build_id: int) -> str:
    """Return the name of a build's partition: `trees_7`.

    Raises:
        ValueError: the table is not partitioned.
    """
    if table not in PARTITIONED:
        raise ValueError(f"{table!r} is not partitioned, expected one of {', '.join(PARTITIONED)}")
    return f"{table}_{build_id:d}"


def create_partition(table: str, build_id: int, name: str | None = None) -> str:
    """Return the statement that makes an empty table for a build, not attached yet, without key and indexes.

    Until it takes the place of an earlier partition it may have another name.

    Its check constraint saves `attach_partition` from reading all rows once more.
    """
    partition = partition_name(table, build_id)
    return (
        f"CREATE TABLE {name or partition} (LIKE {table} INCLUDING COMMENTS INCLUDING DEFAULTS INCLUDING STORAGE, "
        f"CONSTRAINT ck_{partition} CHECK (build_id = {build_id:d}))"
    )


def attach_partition(table: str, build_id: int) -> list[str]:
    """Return the statements that turn a filled table into a partition: key, indexes, statistics."""
    name = partition_name(table, build_id)
    return [
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES IN ({build_id:d})",
        f"ALTER TABLE {name} DROP CONSTRAINT ck_{name}",
        f"ANALYZE {name}",
    ]


def drop_partition(table: str, build_id: int) -> str:
    """Return the statement that drops a build's partition, attached or not, if there is one.

    It waits for readers of the whole table that are in a transaction, and new ones wait for it: set a lock timeout.
    """
    return f"DROP TABLE IF EXISTS {partition_name(table, build_id)}"
