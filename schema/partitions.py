"""The partitions of `ngrams`, `kept_ngrams` and `trees`: one per build, named `<table>_<build id>`.

A partition is created as a separate table, filled by COPY, and then attached, all in one transaction. Readers of other
partitions never wait, and see the new one as a whole or not at all. Attaching builds the parent's primary key and
indexes over the filled table in one go; only another load that attaches at the same moment waits for it.

    BEGIN
    create_partition("trees", 7)
    COPY trees_7 FROM STDIN WITH (FORMAT binary, FREEZE)   -- FREEZE: no VACUUM before index-only scans
    attach_partition("trees", 7)
    COMMIT
"""

import re

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
