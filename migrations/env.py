"""Alembic's environment for the catalogue: one migration at a time, in one transaction, without long waits.

An empty database gets its tables from the models and the newest revision; revisions change the tables of others.

Run by `draftstore db migrate` and by the command `alembic`. A caller may pass a URL (`config.attributes["url"]`) and
another `lock_timeout`; otherwise the database is the one that every command uses.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import Connection, NullPool, text

import schema.collections.models  # noqa: F401 (its tables belong to the same metadata)
from schema import views
from schema.db.database import make_engine
from schema.db.partitions import PARTITION_NAME
from schema.models import Base

LOCK_KEY = 0x6472616674  # "draft": the holder of this advisory lock migrates
WAIT_FOR_OTHERS = "120s"  # for a migration in another process
LOCK_TIMEOUT = "10s"  # for a table in use: better to fail and change nothing than to make others queue
STATEMENT_TIMEOUT = "300s"


def include_name(name: str | None, kind: str, _parents: Any) -> bool:
    """Exclude the partitions, which are created at run time, from comparisons of models and database."""
    return not (kind == "table" and name and PARTITION_NAME.fullmatch(name))


def create_missing_views(bind: Connection) -> None:
    """Create the views if the database is at the newest revision; revisions drop them before they change tables."""
    if context.get_context().get_current_heads() != (context.script.get_current_head(),):
        return
    if bind.scalar(text("SELECT to_regclass('live_releases')")) is None:
        for statement in views.create_statements():
            bind.exec_driver_sql(statement)


@contextmanager
def connection() -> Iterator[Connection]:
    """Yield a connection to the database."""
    url = context.config.attributes.get("url")
    with make_engine(check=False, url=url, poolclass=NullPool).connect() as own:
        yield own


def migrate() -> None:
    """Wait for other migrations, then run the outstanding ones in one transaction."""
    with connection() as bind:
        context.configure(
            connection=bind,
            target_metadata=Base.metadata,
            include_name=include_name,
            compare_server_default=True,
        )
        with context.begin_transaction():
            bind.execute(text(f"SET LOCAL lock_timeout = '{WAIT_FOR_OTHERS}'"))
            bind.execute(text("SET LOCAL statement_timeout = 0"))
            bind.execute(text(f"SELECT pg_advisory_xact_lock({LOCK_KEY})"))
            timeout = context.config.attributes.get("lock_timeout", LOCK_TIMEOUT)
            bind.execute(text(f"SET LOCAL lock_timeout = '{timeout}'"))
            bind.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'"))
            if not context.get_context().get_current_heads():
                Base.metadata.create_all(bind)
                context.get_context().stamp(context.script, "head")
            context.run_migrations()
            create_missing_views(bind)


if context.is_offline_mode():
    raise CommandError(
        "migrations need a database: --sql is not supported, since the views are created at the end"
    )
if context.config.cmd_opts is not None:  # the command alembic, not a library call
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("alembic").setLevel(logging.INFO)
migrate()
