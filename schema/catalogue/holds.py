"""Liveness of running builds: the process of a build holds an advisory lock, keyed by the build's id.

PostgreSQL releases the lock when the process ends, in whatever way, so a build that is `running` without a lock was cut
off. A builder that loses its connection, as on a server restart, also counts as cut off; it can still finish its
build.
"""

import atexit
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from draftstore.errors import DraftstoreError
from schema.db.database import is_lent
from schema.db.errors import DatabaseError

LOCK_CLASS = 0x64726166  # "draf": first half of the lock keys; the second is the build's id

NOT_HELD = f"""
NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {LOCK_CLASS} AND objid = builds.id
)"""  # noqa: S608 - a constant
"""Condition on rows of `builds`: no process holds their lock."""

_held: dict[tuple[str, int], Connection] = {}


def hold(engine: Engine, build_id: int) -> None:
    """Mark a build as made by this process, until `let_go` or the end of the process; no pooler may be between."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    connection.detach()  # never returns to the pool: closing it releases the lock
    with engine.connect() as other:
        lent = is_lent(_driver(connection), _driver(other))
    if lent:
        _close(connection)
        raise DatabaseError(
            "a build holds a lock as long as its session, which lasts only for a transaction behind the pooler that "
            "DRAFTSTORE_DATABASE_URL names: name the PostgreSQL server itself (its direct URL), and try again"
        )
    connection.execute(text(f"SELECT pg_advisory_lock({LOCK_CLASS}, {build_id:d})"))
    _held[_key(engine, build_id)] = connection


def _driver(connection: Connection) -> Any:
    return connection.connection.dbapi_connection


def let_go(engine: Engine, build_id: int) -> None:
    """Release a build's lock if this process holds it."""
    connection = _held.pop(_key(engine, build_id), None)
    if connection is not None:
        _close(connection)


def _key(engine: Engine, build_id: int) -> tuple[str, int]:
    return engine.url.render_as_string(), build_id


def _close(connection: Connection) -> None:
    try:
        connection.close()
    except (DBAPIError, DraftstoreError):  # the server is already gone
        connection.invalidate()


@atexit.register
def _let_go_of_all() -> None:
    while _held:
        _close(_held.popitem()[1])
