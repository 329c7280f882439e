"""`draftstore db`: the catalogue's database, embedded or named by DRAFTSTORE_DATABASE_URL."""

from contextlib import suppress
from typing import Any

import click
import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

from draftstore.cli.common import status
from draftstore.cli.options import Group
from draftstore.cli.output import json_option, print_fields, print_json, print_result
from draftstore.errors import MissingExtraError
from schema.db import embedded
from schema.db.database import REVISION, connect, database_revision, database_url, is_embedded, migrate
from schema.db.embedded import data_home, find_programs
from schema.db.errors import DatabaseError, database_errors

HIDDEN = "***"


@click.group(cls=Group)
def db() -> None:
    """Start, stop, inspect and migrate the catalogue's database.

    DRAFTSTORE_DATABASE_URL names a PostgreSQL server. Without it, an embedded server in the data folder
    (DRAFTSTORE_HOME) starts with the first command that needs it and stops with the last one.

    \b
    Examples:
      draftstore db status
      draftstore db start        # keep the embedded server up until `draftstore db stop`
      draftstore db start && psql "$(draftstore db url)"
    """


@db.command()
@json_option
def url(as_json: bool) -> None:
    """Print the URL of the database without its password, starting the embedded server if it has a database.

    The embedded server stops with the last draftstore command: `draftstore db start` keeps it up.

    \b
    Example:
      draftstore db start && psql "$(draftstore db url)"
    """
    shown = _without_password(database_url(make=False))
    print_result({"url": shown, "embedded": is_embedded()}, as_json, shown)


@db.command("status")
@click.argument("field", required=False)
@json_option
def show_status(field: str | None, as_json: bool) -> None:
    """Show the server's status and location and the revision of its tables, without starting it.

    PostgreSQL's own programs, such as psql and pg_dump, are in the folder of programs. FIELD prints one value alone,
    by its name in JSON.

    \b
    Examples:
      draftstore db status --json
      draftstore db status programs
    """
    found: dict[str, Any] = {"embedded": is_embedded(), "home": str(data_home())}
    if is_embedded():
        cluster = embedded.find_cluster(data_home())
        found |= {"folder": str(cluster.base), **cluster.state()._asdict()}
        with suppress(MissingExtraError):
            found["programs"] = str(find_programs())
        if found["status"] == "ready":  # not as a user of the server, who would stop it at the end
            with database_errors(), psycopg.connect(cluster.url, autocommit=True) as connection:
                found |= {"url": cluster.url} | _ask_server(connection)
    else:
        with connect(check=False, autocommit=True) as connection:
            found |= {"status": "ready", "url": _without_password(database_url())} | _ask_server(connection)
    if field and found.get(field) is None:
        raise DatabaseError(f"there is no {field!r} now: see `draftstore db status --json`")
    if field:
        print_result({field: found[field]}, as_json, str(found[field]))
    elif as_json:
        print_json(found)
    else:
        _print_status(found)


def _ask_server(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    found = connection.cursor(row_factory=dict_row).execute(
        "SELECT current_setting('server_version') AS version, pg_database_size(current_database()) AS bytes,"
        " (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()) AS clients"
    )
    revision = database_revision(connection)
    schema = "current" if revision == REVISION else "other" if revision else "empty"
    return {**(found.fetchone() or {}), "schema": schema, "revision": revision, "needed": REVISION}


def _print_status(found: dict[str, Any]) -> None:
    kind, more = "embedded server" if found["embedded"] else "named server", ""
    if found.get("kept"):
        more = ", kept up until `draftstore db stop`"
    elif found["status"] == "ready" and found.get("used") is False:
        more = ", left by a process that was killed: the next command, or `draftstore db stop`, ends it"
    fields: dict[str, Any] = {"server": f"{kind}, {found['status']}{more}"}
    fields |= {key: found.get(key) for key in ("folder", "programs", "url")}
    pid = found.get("pid")
    fields |= {"PostgreSQL": found.get("version"), "process": pid and str(pid)}
    if "bytes" in found:
        revision = f"{found['revision'] or 'none'} ({found['schema']}; this version needs {found['needed']})"
        fields |= {"bytes": found["bytes"], "clients": found["clients"], "tables": revision}
    print_fields(fields)


@db.command()
@json_option
def start(as_json: bool) -> None:
    """Start the embedded server and keep it running until `draftstore db stop`.

    \b
    Example:
      draftstore db start
    """
    _require_embedded("start")
    with status("starting PostgreSQL"):
        cluster = embedded.join(data_home(), keep=True)
    state = cluster.state()
    fields = {"status": state.status, "pid": state.pid, "url": cluster.url}
    print_result(fields, as_json, f"PostgreSQL is up, process {state.pid}: {cluster.url}")


@db.command()
@json_option
def stop(as_json: bool) -> None:
    """Stop the embedded server, even if it is in use; its data remain.

    \b
    Example:
      draftstore db stop
    """
    _require_embedded("stop")
    stopped = embedded.stop(data_home())
    text = "PostgreSQL has stopped" if stopped else "PostgreSQL was not running"
    print_result({"stopped": stopped}, as_json, text)


@db.command("migrate")
@json_option
def migrate_tables(as_json: bool) -> None:
    """Create the tables, or migrate them to this version's revision.

    The embedded server is migrated automatically, your own server only by this command. The role of
    DRAFTSTORE_READER_URL, which may only read the tables, is created too.

    \b
    Example:
      export DRAFTSTORE_DATABASE_URL=postgresql://me:secret@db.example/draftstore
      export DRAFTSTORE_READER_URL=postgresql://draftstore_reader:other@db.example/draftstore
      draftstore db migrate
    """
    with status("migrating"):
        revision = migrate()
    print_result({"revision": revision}, as_json, f"the tables are at revision {revision}")


def _require_embedded(what: str) -> None:
    if not is_embedded():
        raise DatabaseError(
            f"DRAFTSTORE_DATABASE_URL names a server, which draftstore does not {what}: unset it for the embedded one"
        )


def _without_password(database: str) -> str:
    if "password" not in conninfo_to_dict(database):
        return database
    from sqlalchemy import make_url

    parsed = make_url(database)
    if "password" in parsed.query:
        parsed = parsed.update_query_dict({"password": HIDDEN})
    return parsed.render_as_string(hide_password=True)
