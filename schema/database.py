"""The catalogue's database: the server that `DRAFTSTORE_DATABASE_URL` names, else the embedded one.

    with connect() as connection:                  # psycopg: bulk loads and lookups
        connection.execute("SELECT ...")
    with Session(make_engine()) as session:        # SQLAlchemy: the catalogue
        ...

Both are the owner of the tables. `connect(reading=True)` is a role that may only read them (`schema.access`), named by
`DRAFTSTORE_READER_URL` or that of the embedded server. All keep the embedded server running for the rest of the
process, and refuse tables of another revision: the embedded server is migrated automatically, a named one only by
`draftstore db migrate`.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from schema.access import make_reader
from schema.embedded import Lease, acquire
from schema.errors import DatabaseUrlError, SchemaError
from schema.failures import database_errors, describe, translate
from schema.home import data_home
from schema.postgres.plan import NAME, READER
from schema.revisions import MIGRATIONS, SchemaState, expected_revision, schema_state

if TYPE_CHECKING:
    import alembic.config
    import sqlalchemy

URL_VARIABLE = "DRAFTSTORE_DATABASE_URL"
READER_VARIABLE = "DRAFTSTORE_READER_URL"
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
RECOVERY_PAUSES = (0.1, 0.5)
"""Seconds before another attempt to reach the embedded server."""
CONNECT_TIMEOUT = 10
"""Seconds."""
Kind = TypeVar("Kind", bound="psycopg.Connection[Any]")

_guard = threading.RLock()
_leases: dict[Path, Lease] = {}
_current: set[str] = set()
"""URLs whose tables this process has checked successfully."""


def _after_fork() -> None:
    """Replace the lock in a forked process: another thread of the parent may have held it."""
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def is_embedded(*, reading: bool = False) -> bool:
    """Return True if no server is named; `reading`: for the reader, which another variable may name."""
    return _variable(reading) is None


def database_url(*, reading: bool = False) -> str:
    """Return the URL of the database, valid for psycopg, libpq and SQLAlchemy 2.1; may contain a password.

    The embedded server is started, or joined, and stays up for the rest of the process. The URL of the reader
    (`reading`) is that of the owner on a named server without a named reader.

    Raises:
        DatabaseUrlError: the variable is not the URL of a PostgreSQL database.
        EmbeddedServerError: the embedded server cannot be started.
    """
    if variable := _variable(reading):
        return _checked_url(variable)
    home = data_home()
    with _guard:
        lease = _leases.get(home)
        if lease is None:
            lease = _leases[home] = acquire(home)
            url = lease.url
        else:
            url = lease.ensure()
    return url.replace(f"//{NAME}@", f"//{READER}@", 1) if reading else url


def _variable(reading: bool) -> str | None:
    variables = (READER_VARIABLE, URL_VARIABLE) if reading else (URL_VARIABLE,)
    return next((variable for variable in variables if os.environ.get(variable)), None)


def _checked_url(variable: str) -> str:
    """Return a named URL without SQLAlchemy's driver name; errors never quote it, it may contain a password."""
    scheme, separator, rest = os.environ[variable].partition("://")
    url = f"postgresql://{rest}"
    if scheme in SCHEMES and separator:
        with suppress(ValueError, psycopg.Error):
            for port in str(conninfo_to_dict(url).get("port") or "").split(","):  # one per host
                int(port or 0)
            return url
    raise DatabaseUrlError(
        f"{variable} is not the URL of a PostgreSQL database: expected "
        "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with characters other than letters and digits "
        "percent-encoded; unset it to use the embedded server"
    )


def connect(*, check: bool = True, reading: bool = False, **options: Any) -> psycopg.Connection:
    """Connect with psycopg, as the owner or as the reader (`reading`), with further `options` of `psycopg.connect`.

    The revision of the tables is checked once per process, unless `check` is False.

    Raises:
        DatabaseError: the server is down or refuses, or the tables have another revision.
    """
    return connect_as(psycopg.Connection[TupleRow], check=check, reading=reading, **options)


def connect_as(
    kind: type[Kind], url: str | None = None, *, check: bool = True, reading: bool = False, **options: Any
) -> Kind:
    """Connect as `connect` does, with a connection class of one's own; `url` is None for the default database."""
    url = url or database_url(reading=reading)
    if check:
        # The tables of the embedded server, its reader among them, may first have to be made, by the owner.
        require_schema(database_url() if is_embedded(reading=reading) else url)
    return _connect(url, kind, reading=reading, **options)


def _connect(url: str, kind: type[Kind], *, reading: bool = False, **options: Any) -> Kind:
    options = {**_defaults(url), **options}
    with database_errors():
        if not is_embedded(reading=reading):
            return kind.connect(url, **options)
        return _patiently(lambda: kind.connect(database_url(reading=reading), **options))


def _patiently(connect: Callable[[], Kind]) -> Kind:
    """Connect to the embedded server, which may be recovering from a killed process."""
    for pause in RECOVERY_PAUSES:
        with suppress(psycopg.OperationalError):
            return connect()
        time.sleep(pause)
    return connect()


def _defaults(url: str) -> dict[str, Any]:
    """Return default connection options that the URL does not set."""
    defaults = {"application_name": "draftstore", "connect_timeout": CONNECT_TIMEOUT}
    return {key: value for key, value in defaults.items() if key not in conninfo_to_dict(url)}


def make_engine(*, check: bool = True, **options: Any) -> "sqlalchemy.Engine":
    """Return a SQLAlchemy engine that raises failures with a known remedy as `DatabaseError`.

    Pooled connections are tested before use, and the embedded server is restarted if it was stopped. The arguments are
    those of `connect`, and `options` further ones of `sqlalchemy.create_engine`.

    Raises:
        DatabaseError: the server is down or refuses, or the tables have another revision.
    """
    import sqlalchemy

    url = database_url()
    if check:
        require_schema(url)
    engine = sqlalchemy.create_engine(
        sqlalchemy.make_url(url).set(drivername="postgresql+psycopg"),
        **{"pool_pre_ping": True, "connect_args": _defaults(url), **options},
    )
    if is_embedded():
        sqlalchemy.event.listen(engine, "do_connect", _follow_server)
    sqlalchemy.event.listen(engine, "handle_error", _raise_ours)
    return engine


def _follow_server(dialect: Any, _record: Any, arguments: Any, parameters: dict[str, Any]) -> Any:
    """Connect for a pool to the embedded server at its present socket; start it if it has ended."""
    parameters["host"] = conninfo_to_dict(database_url())["host"]
    return _patiently(lambda: dialect.connect(*arguments, **parameters))


def _raise_ours(context: "sqlalchemy.ExceptionContext") -> BaseException | None:
    """Replace SQLAlchemy's error; the pool handles failures of its own tests."""
    return None if context.is_pre_ping else translate(context.original_exception)


def require_schema(url: str | None = None) -> None:
    """Check the revision of the tables, of the default database without a URL; migrate those of the embedded server."""
    url = url or database_url()
    if url in _current:
        return
    with _connect(url, psycopg.Connection[TupleRow], autocommit=True) as connection:
        state, found = schema_state(connection)
    if state in (SchemaState.EMPTY, SchemaState.BEHIND) and is_embedded():
        migrate()
    elif state is not SchemaState.CURRENT:
        raise _schema_error(state, found, url)
    _current.add(url)


def _schema_error(state: SchemaState, found: str | None, url: str) -> SchemaError:
    where = describe(url)
    needed = expected_revision()
    if state is SchemaState.EMPTY:
        return SchemaError(f"{where} holds no tables of draftstore: make them with `draftstore db migrate`")
    if state is SchemaState.BEHIND:
        return SchemaError(
            f"the tables in {where} are at revision {found}, and this version of draftstore needs {needed}: stop what "
            "uses them and run `draftstore db migrate`"
        )
    if state is SchemaState.UNSUPPORTED:
        return SchemaError(
            f"the tables in {where} are at revision {found}, of a version before 0.1.0, and cannot be migrated: use an "
            "empty database, such as that of another DRAFTSTORE_HOME, and register your stores there with `draftstore "
            "builds add`"
        )
    return SchemaError(
        f"the tables in {where} are at revision {found}, which this version of draftstore does not know (its newest "
        f"is {needed}): update draftstore, a newer version has migrated them"
    )


def migrate() -> str:
    """Migrate the tables to the newest revision and return it; concurrent calls run one after the other.

    The reader is made as well: that of the embedded server, or the one that `DRAFTSTORE_READER_URL` names.

    Raises:
        DatabaseError: the server is down or refuses, a lock cannot be taken, the tables cannot be migrated, or the
            owner may not make the reader.
    """
    import alembic.command

    url = database_url()
    with _connect(url, psycopg.Connection[TupleRow], autocommit=True) as connection:
        state, found = schema_state(connection)
    if state in (SchemaState.AHEAD, SchemaState.UNSUPPORTED):
        raise _schema_error(state, found, url)
    with database_errors():
        alembic.command.upgrade(alembic_config(url), "head")
        if is_embedded() or os.environ.get(READER_VARIABLE):
            with _connect(url, psycopg.Connection[TupleRow], autocommit=True) as connection:
                make_reader(connection, database_url(reading=True))
    return expected_revision()


def alembic_config(url: str | None = None) -> "alembic.config.Config":
    """Return Alembic's configuration for the migrations of this checkout; `url` is None for the default database."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url or database_url()
    return config


def close() -> None:
    """Release the embedded server before the process ends."""
    with _guard:
        for lease in _leases.values():
            lease.release()
        _leases.clear()
        _current.clear()
