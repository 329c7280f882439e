"""`draftstore sql`: SQL queries on the catalogue, by default with a read-only role."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import click
import psycopg
from psycopg import errors
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from draftstore.cli.options import Command
from draftstore.cli.output import json_option, print_csv, print_json, print_table, say
from draftstore.errors import DraftstoreError, counted
from schema.db.access import require_reader
from schema.db.database import behind_pooler, connect
from schema.db.errors import database_errors

ROWS_SHOWN = 1000
SEVERAL = "cannot insert multiple commands into a prepared statement"
SERVER_STATES = ("08", "53", "57")
"""Classes of server errors unrelated to the query."""

Row = Sequence[Any]


class QueryError(DraftstoreError):
    """PostgreSQL rejects a query; the message shows the position."""


class StatementResult(NamedTuple):
    """The result of a statement: column names (none for a command), rows and status."""

    names: list[str]
    rows: Iterable[Row]
    done: str


@click.command(cls=Command)
@click.argument("query", metavar="QUERY|FILE.sql|-")
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header instead of a table.")
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=ROWS_SHOWN,
    show_default=True,
    help="Maximum number of rows in a table; 0 for all. JSON and CSV include all.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Maximum duration in seconds; 0 for none.",
)
@click.option("--write", is_flag=True, help="Query as the owner of the tables, and commit changes.")
def sql(query: str, as_json: bool, as_csv: bool, rows: int, timeout: float, write: bool) -> None:
    """Query the catalogue in SQL with a read-only role; for psql, see `draftstore db url --help`.

    \b
    Examples:
      draftstore sql "SELECT * FROM live_releases"
      draftstore sql "SELECT text, count FROM top_ngrams WHERE build_id = 3 AND n = 2 ORDER BY rank LIMIT 20"
      draftstore sql --csv question.sql > answer.csv
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    text = _read(query)
    if not text.strip():
        raise QueryError("the query is empty: pass SQL, a file, or - for stdin")
    connection = connect(autocommit=True, reading=not write)
    with closing(connection), database_errors():
        if not write:
            require_reader(connection)
            # The reader's rights guard the tables. A read-only transaction, which a single statement cannot leave and
            # which is never committed, guards what any role may change: its own settings and password, large objects.
            connection.execute("BEGIN READ ONLY")
        try:
            # In the transaction: after a first query, nothing can make it writable.
            if not write or not behind_pooler(connection, reading=False):  # whose sessions are others', too
                connection.execute(
                    "SELECT set_config('statement_timeout', %s, %s), set_config('IntervalStyle', 'postgres', %s)",
                    (f"{timeout * 1000:.0f}", not write, not write),
                )
            for result in _answers(connection, text, several=write):
                _print_answer(result, as_json, as_csv, rows)
        except psycopg.Error as error:
            raise _explained(error, text, timeout) or error from None


def _read(query: str) -> str:
    try:
        text = sys.stdin.read() if query == "-" else query
        text = Path(query).read_text(encoding="utf-8") if query.endswith(".sql") else text
        text.encode()  # surrogates stand for bytes of another encoding
    except FileNotFoundError:
        raise QueryError(f"{query} does not exist: pass a query in SQL, a file, or - for stdin") from None
    except UnicodeError as error:
        raise QueryError(f"the query is not valid text: {error}") from None
    return text


def _answers(connection: psycopg.Connection[Row], text: str, *, several: bool) -> Iterator[StatementResult]:
    """Run SQL and yield the result of each statement; a second one could leave the transaction: only if `several`."""
    with connection.cursor() as cursor:
        if not several and (names := _column_names(connection, text)):
            # Stream row by row: a large result need not fit into memory.
            yield StatementResult(names, cursor.stream(text), "")
            return
        cursor.execute(text.encode())
        for result in cursor.results():
            found = [column.name for column in result.description or ()]
            yield StatementResult(found, iter(result) if found else (), result.statusmessage or "")


def _column_names(connection: psycopg.Connection[Row], text: str) -> list[str]:
    """Return the column names of a statement, empty for a command; the server refuses several statements."""
    encoding = connection.info.encoding
    for result in (
        connection.pgconn.prepare(b"", text.encode(encoding)),
        connection.pgconn.describe_prepared(b""),
    ):
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result, encoding)
    return [(result.fname(column) or b"").decode(encoding) for column in range(result.nfields)]


def _print_answer(answer: StatementResult, as_json: bool, as_csv: bool, shown: int) -> None:
    if not answer.names:
        say(answer.done, err=as_json or as_csv)
    elif as_json:
        if repeated := [name for name in answer.names if answer.names.count(name) > 1]:
            raise QueryError(
                f"two columns are called {repeated[0]!r}: give them different names with AS, or omit --json"
            )
        print_json([dict(zip(answer.names, row, strict=True)) for row in answer.rows])
    elif as_csv:
        print_csv(answer.names, answer.rows)
    else:
        rows = iter(answer.rows)
        head = list(islice(rows, shown or None))
        print_table(answer.names, head, plain=True)
        more = bool(shown) and next(rows, None) is not None
        number = counted(len(head), "row")
        say(f"the first {number}; --rows 0 prints all" if more else number, err=True)


def _explained(error: psycopg.Error, text: str, timeout: float) -> QueryError | None:
    """Return the error in the query; None if the server caused it."""
    if isinstance(error, errors.QueryCanceled) and "statement timeout" in str(error):
        return QueryError(f"no answer within {timeout:g} seconds: allow more with --timeout")
    if error.sqlstate is None and not isinstance(error, psycopg.OperationalError):  # COPY, dates after 9999
        return QueryError(f"{error}: psql can do it, see `draftstore db url --help`")
    if error.sqlstate is None or error.sqlstate[:2] in SERVER_STATES:
        return None
    sentence = error.diag.message_primary or str(error)
    if SEVERAL in sentence:
        return QueryError(
            "these are several statements: run one at a time; --write runs several, as the owner"
        )
    if isinstance(error, errors.ReadOnlySqlTransaction | errors.InsufficientPrivilege):
        return QueryError(f"{sentence}: --write allows changes")
    hint = f"\nhint: {error.diag.message_hint}" if error.diag.message_hint else ""
    return QueryError(f"{sentence}{_place(error, text)}{hint}")


def _place(error: psycopg.Error, text: str) -> str:
    """Return the position of an error: line and column, the line, and an arrow below it."""
    if not error.diag.statement_position:
        return ""
    before = text[: int(error.diag.statement_position) - 1]
    number, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1)
    line = text.split("\n")[number - 1]
    return f" (line {number}, column {column + 1})\n  {line}\n  {' ' * column}^"
