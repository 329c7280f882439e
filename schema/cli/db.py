"""`draftstore db`: the catalogue's database, embedded or named by DRAFTSTORE_DATABASE_URL."""

from contextlib import suppress
from typing import Any

import click
from psycopg.conninfo import conninfo_to_dict
from rich.table import Table

from draftstore.cli.common import json_option, print_json, status, stdout_console
from draftstore.errors import MissingExtraError
from schema import embedded
from schema.database import connect, database_url, is_embedded, migrate
from schema.errors import DatabaseError
from schema.home import data_home
from schema.postgres.placement import find_binaries, find_place
from schema.postgres.state import server_state
from schema.revisions import expected_revision, schema_state

HIDDEN = "***"


@click.group()
def db() -> None:
    """Start, stop, look at and migrate the database of the catalogue.

    DRAFTSTORE_DATABASE_URL names a PostgreSQL server. Without it an embedded one starts by itself, in the data
    folder (DRAFTSTORE_HOME), with the first command that needs it, and ends shortly after the last one.

    \b
    Examples:
      draftstore db status
      draftstore db start        # keep the embedded server up until `draftstore db stop`
      draftstore db start && psql "$(draftstore db url)"
    """


@db.command()
@json_option
def url(as_json: bool) -> None:
    """Print the URL of the database, starting the embedded server; a password is not printed.

    The embedded server ends two seconds after the last draftstore command: `draftstore db start` keeps it up.

    \b
    Example:
      draftstore db start && psql "$(draftstore db url)"
    """
    shown = _without_password(database_url())
    if as_json:
        print_json({"url": shown, "embedded": is_embedded()})
    else:
        click.echo(shown)


@db.command("status")
@json_option
def show_status(as_json: bool) -> None:
    """Show whether the server runs, where, and which revision its tables have; this starts nothing.

    PostgreSQL's own programs, such as psql and pg_dump, lie in the folder of programs.

    \b
    Example:
      draftstore db status --json
    """
    found: dict[str, Any] = {"embedded": is_embedded()}
    state = None
    if is_embedded():
        state = server_state(find_place(data_home()).base)
        found |= {"status": state.status, "folder": str(state.base), "kept": state.kept, "pid": state.server}
        with suppress(DatabaseError, MissingExtraError):  # not installed
            found["programs"] = str(find_binaries() / "bin")
    if state is None or state.status == "ready":
        found |= {"status": "ready"} | _ask_server()
    if as_json:
        print_json(found)
    else:
        _print_status(found)


def _ask_server() -> dict[str, Any]:
    """Return the status of a running server."""
    with connect(check=False, autocommit=True) as connection:
        row = connection.execute(
            "SELECT current_setting('server_version'), pg_database_size(current_database()),"
            " (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND pid <> pg_backend_pid())"
        ).fetchone()
        assert row is not None
        schema, revision = schema_state(connection)
    version, size, clients = row
    return {
        "url": _without_password(database_url()),
        "version": version,
        "bytes": size,
        "clients": clients,
        "schema": schema.value,
        "revision": revision,
        "needed": expected_revision(),
    }


def _print_status(found: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    kind = "embedded server" if found["embedded"] else "named server"
    kept = ", kept up until `draftstore db stop`" if found.get("kept") else ""
    table.add_row("server", f"{kind}, {found['status']}{kept}")
    names = {
        "folder": "folder",
        "programs": "programs",
        "url": "url",
        "version": "PostgreSQL",
        "pid": "process",
    }
    for key, name in names.items():
        if found.get(key):
            table.add_row(name, str(found[key]))
    if "bytes" in found:
        table.add_row("bytes", f"{found['bytes']:,}")
        table.add_row("clients", f"{found['clients']:,}")
        revision = f"{found['revision'] or 'none'} ({found['schema']}; this version needs {found['needed']})"
        table.add_row("tables", revision)
    stdout_console().print(table)


@db.command()
@json_option
def start(as_json: bool) -> None:
    """Start the embedded server and keep it up until `draftstore db stop`; a second time changes nothing.

    \b
    Example:
      draftstore db start
    """
    _require_embedded("start")
    with status("starting PostgreSQL"):
        state = embedded.keep(data_home())
    if as_json:
        print_json({"status": state.status, "pid": state.server, "url": state.url})
    else:
        click.echo(f"PostgreSQL is up, process {state.server}: {state.url}")


@db.command()
@json_option
def stop(as_json: bool) -> None:
    """Stop the embedded server, even if it is in use; its data stay.

    \b
    Example:
      draftstore db stop
    """
    _require_embedded("stop")
    stopped = embedded.stop(data_home())
    if as_json:
        print_json({"stopped": stopped})
    else:
        click.echo("PostgreSQL has stopped" if stopped else "PostgreSQL was not running")


@db.command("migrate")
@json_option
def migrate_tables(as_json: bool) -> None:
    """Make the tables, or bring them to the revision that this version needs.

    The embedded server is brought up to date by itself; a named one is left alone until this command. The role of
    DRAFTSTORE_READER_URL is made too, and may read the tables and do nothing else.

    \b
    Example:
      export DRAFTSTORE_DATABASE_URL=postgresql://me:secret@db.example/draftstore
      export DRAFTSTORE_READER_URL=postgresql://draftstore_reader:other@db.example/draftstore
      draftstore db migrate
    """
    with status("migrating"):
        revision = migrate()
    if as_json:
        print_json({"revision": revision})
    else:
        click.echo(f"the tables are at revision {revision}")


def _require_embedded(what: str) -> None:
    if not is_embedded():
        raise DatabaseError(
            f"DRAFTSTORE_DATABASE_URL names a server, which draftstore does not {what}: unset it for the embedded one"
        )


def _without_password(database: str) -> str:
    """Return a URL with its password hidden, in user info or query."""
    if "password" not in conninfo_to_dict(database):
        return database
    from sqlalchemy import make_url

    parsed = make_url(database)
    if "password" in parsed.query:
        parsed = parsed.update_query_dict({"password": HIDDEN})
    return parsed.render_as_string(hide_password=True)
