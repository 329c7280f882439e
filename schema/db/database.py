"""The catalogue's database: the server named by `DRAFTSTORE_DATABASE_URL`, else the embedded one.

    with connect() as connection:                  # psycopg: bulk loads and lookups
        connection.execute("SELECT ...")
    with Session(make_engine()) as session:        # SQLAlchemy: the catalogue
        ...

Both connect as the owner of the tables. `connect(reading=True)` connects as a role that may only read them (`access`),
named by `DRAFTSTORE_READER_URL`, or the embedded server's. All keep the embedded server running for the rest of the
process and refuse tables of another revision: the embedded server is migrated automatically, a named one only by
`draftstore db migrate`. Sessions inherit no encoding, time zone or style of dates: psycopg reads one style only.
"""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from schema.db.access import make_reader
from schema.db.embedded import NAME, READER, data_home, find_cluster, join
from schema.db.errors import DatabaseError, database_errors, describe, translate

if TYPE_CHECKING:
    import alembic.config
    import sqlalchemy

MIGRATIONS = Path(__file__).parents[2] / "migrations"
REVISION = "0006"
"""The newest revision. Alembic reports the same, but takes longer to import than most commands take to run."""
URL_VARIABLE = "DRAFTSTORE_DATABASE_URL"
READER_VARIABLE = "DRAFTSTORE_READER_URL"
SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
RECOVERY_PAUSES = (0.1, 0.5, 2.0, 5.0)
"""Seconds before another attempt to reach the embedded server."""
CONNECT_TIMEOUT = 5
"""Seconds."""
ANSWER_SECONDS = 5
"""Time limit for a statement of `connect_reader`, and for the network to deliver its answer."""
ABSENT = (
    "there is no catalogue in {} yet: `draftstore catalogue add DIR` or `corpus add NAME PATH` makes one; "
    "DRAFTSTORE_HOME names another data folder"
)
STYLE = {"PGDATESTYLE": "ISO, MDY", "PGTZ": "UTC"}
"""Variables that libpq sends as startup parameters: poolers keep these, but refuse `options` and may forget SET."""

_current: set[str] = set()
"""URLs whose tables this process has checked successfully."""


def is_embedded(*, reading: bool = False) -> bool:
    """Return True if no server is named; `reading`: for the reader, which has its own variable."""
    return _variable(reading) is None


def database_url(*, reading: bool = False, make: bool = True) -> str:
    """Return the URL of the database, valid for psycopg, libpq and SQLAlchemy 2.1; may contain a password.

    The embedded server is started or joined and stays up for the rest of the process; only `make` creates its database.
    On a named server without a named reader, the URL of the reader (`reading`) is the owner's.
    """
    if variable := _variable(reading):
        return _checked_url(variable)
    if not make and not (find_cluster(data_home()).base / "data").exists():
        raise DatabaseError(ABSENT.format(data_home()))
    url = join(data_home()).url
    return url.replace(f"//{NAME}@", f"//{READER}@", 1) if reading else url


def _variable(reading: bool) -> str | None:
    variables = (READER_VARIABLE, URL_VARIABLE) if reading else (URL_VARIABLE,)
    return next((variable for variable in variables if os.environ.get(variable)), None)


def _checked_url(variable: str) -> str:
    """Return a named URL without SQLAlchemy's driver name; errors never quote it, since it may contain a password."""
    scheme, separator, rest = os.environ[variable].partition("://")
    url = f"postgresql://{rest}"
    if scheme in SCHEMES and separator:
        with suppress(ValueError, psycopg.Error):
            for port in str(conninfo_to_dict(url).get("port") or "").split(","):  # one per host
                int(port or 0)
            return url
    raise DatabaseError(
        f"{variable} is not the URL of a PostgreSQL database: expected "
        "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with characters other than letters and digits "
        "percent-encoded; unset it to use the embedded server"
    )


def connect(*, check: bool = True, reading: bool = False, **options: Any) -> psycopg.Connection:
    """Connect with psycopg, as the owner or as the reader (`reading`), with further `options` of `psycopg.connect`.

    The revision of the tables is checked once per process, unless `check` is False.
    """
    if check:
        require_schema(reading=reading, make=not reading)
    with database_errors():
        return _connect(database_url(reading=reading), is_embedded(reading=reading), options)


def _connect(url: str, embedded: bool, options: dict[str, Any]) -> psycopg.Connection:
    """Connect; an embedded server is started if it has ended, and may be recovering from a killed process."""
    os.environ.update(STYLE)
    options = {**_defaults(url), **options, "client_encoding": "UTF8", "prepare_threshold": None}
    for pause in RECOVERY_PAUSES if embedded else ():
        database_url()
        with suppress(psycopg.OperationalError):
            return psycopg.connect(url, **options)
        time.sleep(pause)
    connection = psycopg.connect(url, **options)
    if (encoding := connection.info.parameter_status("server_encoding")) not in (None, "UTF8"):
        connection.close()
        raise DatabaseError(
            f"{describe(url)} has the encoding {encoding}, but texts need UTF8: name another that PostgreSQL made by "
            "CREATE DATABASE draftstore ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0"
        )
    return connection


def connect_reader() -> psycopg.Connection:
    """Connect as the reader in autocommit mode, for `ask`."""
    connection = connect(reading=True, autocommit=True)
    with database_errors():
        if not behind_pooler(connection, reading=True):
            # The plan of a lookup does not depend on its keys: a generic one saves planning.
            connection.execute(
                f"SET statement_timeout = '{ANSWER_SECONDS}s'; SET plan_cache_mode = force_generic_plan".encode()
            )
            connection.prepare_threshold = 0
    return connection


def behind_pooler(connection: psycopg.Connection[Any], *, reading: bool) -> bool:
    """Return True if a pooler stands before the server: settings and prepared statements may meet other sessions."""
    if connection.info.backend_pid != _process(connection):  # poolers announce one of their own making
        return True
    with connect(check=False, reading=reading) as other:
        return is_lent(connection, other)


def is_lent(connection: psycopg.Connection[Any], other: psycopg.Connection[Any]) -> bool:
    """Return True if a pooler lends a session's process between transactions; `other` is not in autocommit mode."""
    seen, others = set[int](), set[int]()
    for _ in range(3):  # other clients may use a pooler meanwhile
        seen.add(_process(connection))
        others.add(_process(other))
        seen.add(_process(connection))
        other.rollback()
    return len(seen) > 1 or not seen.isdisjoint(others)


def _process(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    return row[0] if row else 0


def ask(connection: psycopg.Connection[Any], query: bytes, parameters: Sequence[object] = ()) -> list[Any]:
    """Return the rows of a query on a connection of `connect_reader`, in one round trip; errors are psycopg's."""
    with connection.cursor(binary=True) as cursor:
        return cursor.execute(query, parameters).fetchall()


def _defaults(url: str) -> dict[str, Any]:
    defaults = {
        "application_name": "draftstore",
        "connect_timeout": CONNECT_TIMEOUT,
        "tcp_user_timeout": 1000 * ANSWER_SECONDS,
        "keepalives_idle": ANSWER_SECONDS,
    }
    return {key: value for key, value in defaults.items() if key not in conninfo_to_dict(url)}


def make_engine(
    *, check: bool = True, make: bool = True, url: str | None = None, **options: Any
) -> "sqlalchemy.Engine":
    """Return a SQLAlchemy engine that raises failures with a known remedy as `DatabaseError`.

    Pooled connections are tested before use, and the embedded server is restarted if it was stopped. The arguments are
    those of `connect` and `database_url`; `url` is None for the default database, `options` are those of
    `sqlalchemy.create_engine`.
    """
    import sqlalchemy

    if check:
        require_schema(make=make)
    embedded, url = url is None and is_embedded(), url or database_url()
    engine = sqlalchemy.create_engine(
        sqlalchemy.make_url(url).set(drivername="postgresql+psycopg"), **{"pool_pre_ping": True, **options}
    )

    @sqlalchemy.event.listens_for(engine, "do_connect")
    def connect_for_pool(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> Any:
        return _connect(url, embedded, parameters)

    @sqlalchemy.event.listens_for(engine, "begin")
    def have_one_style(bind: sqlalchemy.Connection) -> None:  # of intervals, for which libpq has no variable
        connection: Any = bind.connection.dbapi_connection
        if connection.info.parameter_status("IntervalStyle") != "postgres":
            connection.execute("SET LOCAL IntervalStyle = postgres")

    sqlalchemy.event.listen(engine, "handle_error", _raise_ours)
    return engine


def _raise_ours(context: "sqlalchemy.ExceptionContext") -> BaseException | None:
    """Replace SQLAlchemy's error; the pool handles failures of its own tests."""
    return None if context.is_pre_ping else translate(context.original_exception)


def database_revision(connection: psycopg.Connection) -> str | None:
    """Return the revision of a database's tables; None if it has none of ours."""
    present = connection.execute("SELECT to_regclass('alembic_version')").fetchone()
    if present is None or present[0] is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def require_schema(*, reading: bool = False, make: bool = True) -> None:
    """Check the revision of the tables once; the owner migrates the embedded server's and creates the reader."""
    reading = reading and not is_embedded(reading=True)
    url = database_url(reading=reading, make=make)
    if url in _current:
        return
    with connect(check=False, reading=reading, autocommit=True) as connection:
        found = database_revision(connection)
    if found != REVISION:
        if not is_embedded(reading=reading):
            holds = f"holds tables of revision {found}" if found else "holds no tables"
            newer = ", or update draftstore if a newer version has migrated them" if found else ""
            raise DatabaseError(
                f"{describe(url)} {holds}, and this version of draftstore needs revision {REVISION}: stop what uses "
                f"it and run `draftstore db migrate`{newer}"
            )
        if found is None and not make:
            raise DatabaseError(ABSENT.format(data_home()))
        if found:
            logging.getLogger(__name__).warning("migrating the catalogue from %s to %s", found, REVISION)
        migrate()
    _current.add(url)


def migrate() -> str:
    """Migrate the tables to the newest revision and return it; concurrent calls run one after the other.

    The reader is created too: the embedded server's, or the one named by `DRAFTSTORE_READER_URL`.
    """
    import alembic.command
    from alembic.util import CommandError

    url = database_url()
    with connect(check=False, autocommit=True) as connection, database_errors():
        try:
            alembic.command.upgrade(alembic_config(url), "head")
        except CommandError as error:
            raise DatabaseError(
                f"the tables in {describe(url)} cannot be migrated: {error}: update draftstore if a newer version has "
                "migrated them; if they are of a version before 0.1.0, name an empty database (or a new folder with "
                "DRAFTSTORE_HOME) and register your stores there with `draftstore catalogue add`"
            ) from None
        if is_embedded() or os.environ.get(READER_VARIABLE):
            make_reader(connection, database_url(reading=True))
    return REVISION


def alembic_config(url: str | None = None) -> "alembic.config.Config":
    """Return Alembic's configuration for the migrations of this checkout; `url` is None for the default database."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url or database_url()
    return config
