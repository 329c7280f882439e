"""Bulk loading: frames of polars go into PostgreSQL by COPY, as CSV, whose values the server converts and checks.

Rows that exist as Python objects anyway, such as keys and values from an iterator, are better sent by psycopg's
`write_row`: see `schema.crest_loading`.
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
    """Copy frames into a table: all of them, or after an exception none.

    NULL and the empty text stay apart. A list has to be a text in PostgreSQL's form: see `array_text`.

    Args:
        connection: where; nothing else can run on it until the last frame is sent.
        table: its name.
        names: the columns that are sent; others get their defaults.
        frames: with these columns, in any order; consumed one by one.
        freeze: write rows as if vacuumed already, which PostgreSQL allows for a table made in this transaction.

    Raises:
        psycopg.Error: no such table or column, or a value that the type of its column does not take.
    """
    statement = copy_statement(table, names, "csv", freeze=freeze)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        for frame in frames:
            buffer = io.BytesIO()
            frame.select(names).write_csv(buffer, include_header=False, quote_style="non_numeric")
            copy.write(buffer.getbuffer())


def array_text(items: pl.Expr) -> pl.Expr:
    """Return PostgreSQL's text of an array, `{1,2}`, from texts of its items joined by commas."""
    return pl.lit("{") + items + pl.lit("}")


def copy_statement(
    table: str, names: Sequence[str], form: Literal["csv", "binary"], *, freeze: bool = False
) -> sql.Composed:
    """Return the statement of a COPY into some columns of a table; for `freeze` see `copy_frames`."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT {}, FREEZE {})").format(
        sql.Identifier(table),
        sql.SQL(", ").join(map(sql.Identifier, names)),
        sql.SQL(form),
        sql.Literal(freeze),
    )
