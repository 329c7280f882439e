"""Which running builds are alive: the process that makes a build holds an advisory lock, keyed by the build's id.

PostgreSQL releases it when the process ends, however that happens, so a build that is `running` while nobody holds its
lock was cut off. A builder that lost its connection for a while, as when the server is restarted, is taken for cut off
too; it can still finish its build.
"""

import atexit

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from draftstore.errors import DraftstoreError

LOCK_CLASS = 0x64726166  # "draf": the first half of the locks' keys, the second is the build's id

NOT_HELD = f"""
NOT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 2
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND classid = {LOCK_CLASS} AND objid = builds.id
)"""  # noqa: S608 - a constant
"""Condition on rows of `builds`: no process makes them."""

_held: dict[tuple[str, int], Connection] = {}


def hold(engine: Engine, build_id: int) -> None:
    """Tell others that this process makes a build, until `let_go` or the end of the process."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    connection.detach()  # never goes back to the pool: to close it is to let go
    connection.execute(text(f"SELECT pg_advisory_lock({LOCK_CLASS}, {build_id:d})"))
    _held[_key(engine, build_id)] = connection


def let_go(engine: Engine, build_id: int) -> None:
    """Let go of a build, if this process holds it."""
    connection = _held.pop(_key(engine, build_id), None)
    if connection is not None:
        _close(connection)


def _key(engine: Engine, build_id: int) -> tuple[str, int]:
    return engine.url.render_as_string(), build_id


def _close(connection: Connection) -> None:
    try:
        connection.close()
    except (DBAPIError, DraftstoreError):  # the server went away before us
        connection.invalidate()


@atexit.register
def _let_go_of_all() -> None:
    while _held:
        _close(_held.popitem()[1])
