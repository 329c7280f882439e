"""The revision of the tables that this checkout needs, and that of a database.

Alembic provides the same, but takes longer to import than most commands take to run.
"""

import enum
import re
from functools import cache
from pathlib import Path

import psycopg

MIGRATIONS = Path(__file__).parent.parent / "migrations"
BEFORE_RELEASE = ("0001", "0002", "0003")
"""Revisions of versions before 0.1.0, which are not migrated."""
ASSIGNED = re.compile(r'^(revision|down_revision) = "(.+)"$', re.MULTILINE)


class SchemaState(enum.Enum):
    """Comparison of a database's tables with the required revision."""

    EMPTY = "empty"
    UNSUPPORTED = "unsupported"
    BEHIND = "behind"
    CURRENT = "current"
    AHEAD = "ahead"


@cache
def known_revisions() -> dict[str, str | None]:
    """Return the revisions in `migrations/versions`, each with its predecessor."""
    files = (MIGRATIONS / "versions").glob("*.py")
    found = [dict(ASSIGNED.findall(path.read_text(encoding="utf-8"))) for path in files]
    return {each["revision"]: each.get("down_revision") for each in found}


def expected_revision() -> str:
    """Return the newest revision."""
    revisions = known_revisions()
    (newest,) = set(revisions) - set(revisions.values())
    return newest


def database_revision(connection: psycopg.Connection) -> str | None:
    """Return the revision of a database; None if it has none of our tables."""
    present = connection.execute("SELECT to_regclass('alembic_version')").fetchone()
    if present is None or present[0] is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def schema_state(connection: psycopg.Connection) -> tuple[SchemaState, str | None]:
    """Return the state of the tables and their revision."""
    found = database_revision(connection)
    if found is None:
        return SchemaState.EMPTY, None
    if found == expected_revision():
        return SchemaState.CURRENT, found
    if found in BEFORE_RELEASE:
        return SchemaState.UNSUPPORTED, found
    return (SchemaState.BEHIND if found in known_revisions() else SchemaState.AHEAD), found
