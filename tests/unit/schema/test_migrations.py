"""Migrations on a real server: in step with the models, by several processes, without long waits."""

import hashlib
import subprocess
import sys

import alembic.command
import psycopg
import pytest
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_mock_engine
from sqlalchemy.dialects import postgresql

import schema.collections.models  # noqa: F401 (its tables belong to the same metadata)
from schema import views
from schema.db.database import alembic_config
from schema.db.errors import DatabaseTimeoutError
from schema.db.partitions import attach_partition, create_partition, drop_partition, partition_name
from schema.models import PARTITIONED, Base

TABLES = (
    "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p', 'v') AND relnamespace = 'public'::regnamespace"
)
MIGRATE = """
import sys
from alembic import command
from schema.db.database import alembic_config
command.upgrade(alembic_config(sys.argv[1]), "head")
"""


def names(url: str, query: str) -> set[str]:
    with psycopg.connect(url) as connection:
        return {row[0] for row in connection.execute(query)}


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url) as connection:
        for statement in statements:
            connection.execute(statement)


def test_models_and_migrations_agree_even_with_partitions(database: str) -> None:
    for table in PARTITIONED:
        execute(database, create_partition(table, 7), *attach_partition(table, 7), create_partition(table, 8))
    alembic.command.check(alembic_config(database))
    execute(database, "ALTER TABLE corpora DROP COLUMN characters")
    with pytest.raises(CommandError, match="New upgrade operations detected"):
        alembic.command.check(alembic_config(database))


def test_the_newest_revision_has_the_hash_of_the_current_definitions() -> None:
    statements = list[str]()
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    engine = create_mock_engine(
        "postgresql+psycopg://",
        lambda statement, *_: statements.append(str(statement.compile(dialect=dialect))),
    )
    Base.metadata.create_all(engine, checkfirst=False)
    definitions = "\n".join([*sorted(statements), *views.create_statements()])
    head = ScriptDirectory.from_config(alembic_config("postgresql://nowhere/none")).get_revision("head")
    assert head is not None
    assert hashlib.sha256(definitions.encode()).hexdigest()[:16] == head.module.DEFINITIONS, (
        "tables or views have changed: databases get them with a new revision, `alembic revision --autogenerate`"
    )


def test_two_processes_migrate_one_after_the_other(empty_database: str) -> None:
    command = [sys.executable, "-c", MIGRATE, empty_database]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert "live_releases" in names(empty_database, TABLES)


def test_a_migration_that_waits_too_long_changes_nothing(empty_database: str) -> None:
    before = names(empty_database, TABLES)
    with psycopg.connect(empty_database) as reader:
        reader.execute("LOCK TABLE pg_class IN SHARE MODE")
        config = alembic_config(empty_database)
        config.attributes["lock_timeout"] = "100ms"
        with pytest.raises(DatabaseTimeoutError, match="lock timeout"):
            alembic.command.upgrade(config, "head")
    assert names(empty_database, TABLES) == before


def test_a_filled_partition_gets_the_key_and_the_indexes_of_its_parent(database: str) -> None:
    indexes = (
        "SELECT count(*), bool_and(indisvalid), bool_or(indisprimary) FROM pg_index "
        "WHERE indrelid = %s::regclass"
    )
    with psycopg.connect(database) as connection:
        for table in PARTITIONED:
            connection.execute(create_partition(table, 3))
            for statement in attach_partition(table, 3):
                connection.execute(statement)
            found = connection.execute(indexes, (partition_name(table, 3),)).fetchone()
            assert found == (1 + len(Base.metadata.tables[table].indexes), True, True)


def test_a_partition_is_dropped_attached_or_not_or_absent(database: str) -> None:
    before = names(database, TABLES)
    execute(
        database,
        create_partition("ngrams", 1),
        *attach_partition("ngrams", 1),
        create_partition("ngrams", 2),
    )
    execute(database, *(drop_partition("ngrams", build) for build in (1, 2, 3)))
    assert names(database, TABLES) == before
