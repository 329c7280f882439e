"""PostgreSQL's client programs, run on the catalogue's database: psql, pg_dump and pg_restore."""

import os
import shutil
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from draftstore.errors import MissingExtraError
from schema.database import database_url
from schema.errors import DatabaseError, EmbeddedServerError
from schema.postgres.placement import find_binaries


def client_command(program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a client program on the database, and its environment.

    The embedded server is started, and stays up while this process lives.

    Args:
        program: `psql`, `pg_dump` or `pg_restore`.
        arguments: further arguments.

    Raises:
        DatabaseError: the program is not installed, or there is no such database.
    """
    parts: dict[str, Any] = conninfo_to_dict(database_url())
    password = parts.pop("password", None)
    # By environment: everybody sees the command lines of processes.
    environment = os.environ | ({"PGPASSWORD": str(password)} if password else {})
    return [str(_find(program)), "-d", make_conninfo(**parts), *arguments], environment


def _find(program: str) -> Path:
    """Return a program of the wheel, else the one on the path.

    Raises:
        DatabaseError: there is none.
    """
    try:
        bundled = find_binaries() / "bin" / program
    except (EmbeddedServerError, MissingExtraError):
        bundled = None
    if bundled and bundled.exists():
        return bundled
    if found := shutil.which(program):
        return Path(found)
    raise DatabaseError(
        f"{program} is not installed: install 'draftstore[schema]', which brings it, or PostgreSQL's client"
    )
