"""Bulk loading of polars frames with COPY, as CSV, whose values the server converts and checks.

For rows that already exist as Python objects, such as keys and values from an iterator, psycopg's `write_row` is
faster: see `schema.crest_loading`.
"""

import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import polars as pl
import psycopg
from psycopg import sql


def copy_frames(
    connection: psycopg.Connection[Any],
    table: str,
    names: Sequence[str],
    frames: Iterable[pl.DataFrame],
    *,
    freeze: bool = False,
) -> None:
    """Copy frames into a table, all or, on an exception, none.

    NULL and empty text stay distinct. A list must be text in PostgreSQL's array syntax: see `array_text`. With `freeze`
    rows are written as already vacuumed; PostgreSQL allows this for tables created in the same transaction.
    """
    statement = copy_statement(table, names, "csv", freeze=freeze)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for frame in frames:
            buffer = io.BytesIO()
            frame.select(names).write_csv(buffer, include_header=False, quote_style="non_numeric")
            copy.write(buffer.getbuffer())


def array_text(items: pl.Expr) -> pl.Expr:
    """Return PostgreSQL's array syntax, `{1,2}`, from comma-separated items."""
    return pl.lit("{") + items + pl.lit("}")


def copy_statement(
    table: str, names: Sequence[str], form: Literal["csv", "binary"], *, freeze: bool = False
) -> sql.Composed:
    """Return the COPY statement for some columns of a table; for `freeze` see `copy_frames`."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {}, FREEZE {})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(form),
        sql.Literal(freeze),
    )
