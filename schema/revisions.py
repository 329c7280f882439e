"""The revision of the tables that this checkout needs, and that of a database.

Alembic provides the same, but takes longer to import than most commands take to run.
"""

import ast
import enum
from functools import cache
from pathlib import Path

import psycopg

MIGRATIONS = Path(__file__).parent.parent / "migrations"


class SchemaState(enum.Enum):
    """Comparison of a database's tables with the required revision."""

    EMPTY = "empty"
    BEHIND = "behind"
    CURRENT = "current"
    AHEAD = "ahead"


@cache
def known_revisions() -> dict[str, str | None]:
    """Return the revisions in `migrations/versions`, each with its predecessor."""
    revisions: dict[str, str | None] = {}
    for path in sorted((MIGRATIONS / "versions").glob("*.py")):
        constants = _constants(ast.parse(path.read_text(encoding="utf-8")))
        revision = constants.get("revision")
        if isinstance(revision, str):
            before = constants.get("down_revision")
            revisions[revision] = before if isinstance(before, str) else None
    return revisions


def _constants(module: ast.Module) -> dict[str, object]:
    """Return the constants that a module assigns to simple names."""
    found: dict[str, object] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if isinstance(statement.value, ast.Constant):
            found |= {target.id: statement.value.value for target in targets if isinstance(target, ast.Name)}
    return found


def expected_revision() -> str | None:
    """Return the newest revision; None if there is none."""
    revisions = known_revisions()
    newest = set(revisions) - {before for before in revisions.values() if before}
    assert len(newest) <= 1, f"migrations/versions has several newest revisions: {sorted(newest)}"
    return next(iter(newest), None)


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
    return (SchemaState.BEHIND if found in known_revisions() else SchemaState.AHEAD), found
