"""The reader: a role of PostgreSQL that may read our tables and do nothing else.

`draftstore sql` and the lookup service connect as the reader. A read-only transaction alone does not protect: in it, a
superuser can read and write files and run programs. So the reader is a member of no role and has no other right.
"""

from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict

from schema.db.embedded import READER
from schema.db.errors import DatabaseError

LOCK_KEY = 0x726561646572  # "reader": the holder of this advisory lock creates it
MAY_CHANGE = """
SELECT rolsuper OR rolcreaterole OR rolcreatedb OR rolreplication OR rolbypassrls
    OR EXISTS (SELECT FROM pg_auth_members WHERE member = reader.oid)
    OR has_database_privilege(reader.oid, current_database(), 'CREATE')
    OR EXISTS (SELECT FROM pg_namespace WHERE has_schema_privilege(reader.oid, pg_namespace.oid, 'CREATE')
               AND nspname !~ '^pg_(toast_)?temp_')
    OR EXISTS (SELECT FROM pg_class AS ours WHERE relnamespace = tables.relnamespace AND CASE
               WHEN relowner = reader.oid THEN true
               WHEN relkind = 'S' THEN has_sequence_privilege(reader.oid, ours.oid, 'UPDATE, USAGE')
               WHEN relkind IN ('r', 'p', 'v', 'm', 'f') THEN
                   has_table_privilege(reader.oid, ours.oid, 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
                   OR has_any_column_privilege(reader.oid, ours.oid, 'INSERT, UPDATE, REFERENCES')
               ELSE false END)
    OR EXISTS (SELECT FROM pg_proc WHERE has_function_privilege(reader.oid, pg_proc.oid, 'EXECUTE')
               AND ((prosecdef AND pronamespace = tables.relnamespace) OR proname = ANY(%(files)s)))
FROM pg_roles AS reader, pg_class AS tables
WHERE rolname = %(name)s AND tables.oid = to_regclass('builds')
"""
FILES = ["pg_read_file", "pg_read_binary_file", "pg_stat_file", "pg_ls_dir", "lo_import", "lo_export"]
"""Functions on files of the server, which only superusers may call unless granted."""
CREATE = "CREATE ROLE {reader} LOGIN PASSWORD {password}"
GRANTS = (
    "GRANT USAGE ON SCHEMA {schema} TO {reader}",
    "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {reader}",
    "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT SELECT ON TABLES TO {reader}",
)


def make_reader(connection: psycopg.Connection[Any], url: str) -> None:
    """Create the reader if it is missing and let it read all tables, including those of later loads.

    `connection` is that of the owner in autocommit mode, and `url` that of the reader: its password becomes the role's.
    Raises DatabaseError if the owner may not create roles, or the role may do more than read.
    """
    login = conninfo_to_dict(url)
    name, password = str(login.get("user") or ""), str(login.get("password") or "")
    if not name:
        raise DatabaseError(
            "DRAFTSTORE_READER_URL names no user: expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    try:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK_KEY])
            if may_change(connection, name) is None:
                # A process in another database may just have created it.
                with suppress(errors.DuplicateObject, errors.UniqueViolation):
                    _run(connection, CREATE, name)
            if may_change(connection, name):
                raise DatabaseError(f"the role {name!r} may do more than read: {_advice(connection, READER)}")
            if password:
                # As a verifier, so that neither the server nor its log sees the password itself.
                secret = connection.pgconn.encrypt_password(password.encode(), name.encode()).decode()
                # An administrator may have made the role and its password.
                with suppress(errors.InsufficientPrivilege):
                    _run(connection, "ALTER ROLE {reader} PASSWORD {password}", name, secret)
            with suppress(errors.InsufficientPrivilege):
                _run(connection, "ALTER ROLE {reader} RESET ALL", name)  # a role may change its own settings
                _run(connection, "ALTER ROLE {reader} SET statement_timeout = '60s'", name)  # behind poolers
            for statement in GRANTS:
                _run(connection, statement, name)
    except errors.InsufficientPrivilege as error:
        raise DatabaseError(f"{error.diag.message_primary}: {_advice(connection, name)}") from None


def require_reader(connection: psycopg.Connection[Any]) -> None:
    """Raise DatabaseError for a connection of a role that may do more than read."""
    # Poolers may log in as another role than the URL's.
    (name,) = connection.execute("SELECT session_user").fetchone() or ("",)
    if may_change(connection, name):
        raise DatabaseError(
            f"the role {name!r} may do more than read, and a query could exploit that: "
            f"{_advice(connection, READER)}\n--write queries as the owner"
        )


def may_change(connection: psycopg.Connection[Any], name: str) -> bool | None:
    """Return True if a role may do more than read our tables; None if there is no such role."""
    row = connection.execute(MAY_CHANGE, {"name": name, "files": FILES}).fetchone()
    return None if row is None else bool(row[0])


def _run(connection: psycopg.Connection[Any], statement: str, name: str, password: str | None = None) -> None:
    """Run a statement in a savepoint, so that the transaction survives its failure."""
    with connection.transaction():
        connection.execute(_filled(connection, statement, name, password))


def _filled(
    connection: psycopg.Connection[Any], statement: str, name: str, password: str | None
) -> sql.Composed:
    row = connection.execute("SELECT current_schema(), current_user").fetchone()
    assert row is not None
    return sql.SQL(statement).format(
        reader=sql.Identifier(name),
        password=sql.Literal(password),
        schema=sql.Identifier(row[0]),
        owner=sql.Identifier(row[1]),
    )


def _advice(connection: psycopg.Connection[Any], name: str) -> str:
    statements = [_filled(connection, text, name, "...").as_string(connection) for text in (CREATE, *GRANTS)]
    return (
        "set DRAFTSTORE_READER_URL to postgresql://USER:PASSWORD@HOST:PORT/DATABASE of a role that may only read, and "
        "run `draftstore db migrate`, which creates the role; or create it yourself:\n"
        + "\n".join(f"  {statement};" for statement in statements)
    )
