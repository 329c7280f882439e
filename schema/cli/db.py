"""`draftstore db`: the catalogue's database, embedded or named by DRAFTSTORE_DATABASE_URL."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from psycopg.conninfo import conninfo_to_dict
from rich.table import Table

from draftstore.cli.common import json_option, print_json, status, stdout_console
from schema import embedded
from schema.backup import BackupError, back_up, missing_stores, restore
from schema.clients import client_command
from schema.database import connect, database_url, is_embedded, migrate
from schema.errors import DatabaseError
from schema.home import data_home
from schema.postgres.placement import find_place
from schema.postgres.state import ServerState, server_state
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
      draftstore db psql
      draftstore db backup catalogue.backup
    """


@db.command()
@json_option
def url(as_json: bool) -> None:
    """Print the URL of the database, starting the embedded server; a password is not printed.

    The embedded server ends two seconds after its last client: `draftstore db start` keeps it up.

    \b
    Example:
      psql "$(draftstore db url)"
    """
    shown = _without_password(database_url())
    if as_json:
        print_json({"url": shown, "embedded": is_embedded()})
    else:
        click.echo(shown)


@db.command("status")
@json_option
def show_status(as_json: bool) -> None:
    """Return True if the server runs, where, and which revision its tables have; this starts nothing.

    \b
    Example:
      draftstore db status --json
    """
    found: dict[str, Any] = {"embedded": is_embedded()}
    state = None
    if is_embedded():
        state = _embedded_state()
        found |= {"status": state.status, "folder": str(state.base), "kept": state.kept, "pid": state.server}
    if state is None or state.status == "ready":
        found |= {"status": "ready"} | _ask_server()
    if as_json:
        print_json(found)
    else:
        _print_status(found)


def _embedded_state() -> ServerState:
    return server_state(find_place(data_home()).base)


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
    for key, name in (("folder", "folder"), ("url", "url"), ("version", "PostgreSQL"), ("pid", "process")):
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


@db.command()
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
def backup(target: Path, force: bool, as_json: bool) -> None:
    """Write the catalogue to a file: builds, releases, statistics, and trees in PostgreSQL.

    Stores are folders that never change: copy them with any program.

    \b
    Example:
      draftstore db backup catalogue.backup
    """
    if target.exists() and not force:
        raise BackupError(f"{target} exists: name another file, or pass --force")
    with status("writing the backup"):
        back_up(target)
    if as_json:
        print_json({"file": str(target), "bytes": target.stat().st_size})
    else:
        click.echo(f"{target}: {target.stat().st_size:,} bytes")


@db.command("restore")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def restore_backup(source: Path, as_json: bool) -> None:
    """Fill an empty database from a file of `draftstore db backup`, and migrate its tables.

    Restore only files that you trust: what they say is run as the owner of the database.

    It may come from an older PostgreSQL or an older draftstore, which is the way to a new major version.

    \b
    Example:
      DRAFTSTORE_HOME=/srv/draftstore draftstore db restore catalogue.backup
    """
    with status("restoring"):
        restore(source)
    missing = missing_stores()
    if as_json:
        print_json({"missing": [{"build": build, "path": path} for build, path in missing]})
        return
    click.echo("The catalogue is restored.")
    for build, path in missing:
        click.echo(f"build {build}: its store is not in {path}; copy it there", err=True)


@db.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def psql(arguments: tuple[str, ...]) -> None:
    """Open PostgreSQL's own shell on the database; what follows is passed to psql.

    \b
    Examples:
      draftstore db psql
      draftstore db psql -c '\\d builds'
    """
    command, environment = client_command("psql", *arguments)
    # No exec: this process keeps the embedded server up. Ctrl-C belongs to psql.
    with _ignored(signal.SIGINT):
        done = subprocess.run(command, env=environment, check=False)  # noqa: S603 - what the user asked for
    sys.exit(done.returncode)


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


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
