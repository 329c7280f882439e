"""Rows of frames arrive in PostgreSQL as they were, whatever their types, sizes and number."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import psycopg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schema.statistics.ngrams import array_text, copy_frames

Connection = psycopg.Connection[Any]
TABLE = (
    "CREATE TEMPORARY TABLE copied (i2 smallint, i4 integer, i8 bigint, l2 smallint[], l4 integer[], l8 bigint[],"
    ' t text, c text COLLATE "C") ON COMMIT DROP'
)
LISTS = ("l2", "l4", "l8")
TYPES: dict[str, Any] = dict.fromkeys(("i2", "i4", "i8"), pl.Int64)
TYPES |= {name: pl.List(pl.Int64) for name in LISTS} | {"t": pl.String, "c": pl.String}


@pytest.fixture(scope="module")
def connection(database_server: str) -> Iterator[Connection]:
    """Return a connection that is for temporary tables alone."""
    with psycopg.connect(database_server, autocommit=True) as connection:
        yield connection


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def rows() -> st.SearchStrategy[list[tuple[Any, ...]]]:
    numbers = [integers(bits) for bits in (16, 32, 64)]
    lists = [st.lists(number, max_size=4) for number in numbers]
    text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    special = st.text('",\\.\n\r\t N{}')  # what means something in CSV and in COPY
    return st.lists(st.tuples(*numbers, *lists, st.none() | text | special, text | special), max_size=8)


def frame_of(values: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    frame = pl.DataFrame(list(values), schema=TYPES, orient="row")
    joined = {name: array_text(pl.col(name).cast(pl.List(pl.String)).list.join(",")) for name in LISTS}
    return frame.with_columns(**joined)


def copied(connection: Connection, *frames: pl.DataFrame) -> list[tuple[Any, ...]]:
    """Copy frames into a table that only this transaction sees, and read them back."""
    with connection.transaction():
        connection.execute(TABLE)
        copy_frames(connection, "copied", list(TYPES), iter(frames))
        return connection.execute("SELECT * FROM copied").fetchall()


@given(rows(), rows())
@example([(0, 0, 0, [], [], [], text, text) for text in ("\\.", "\n\\.\n", "\\N", "NULL", "", "a\r\nb")], [])
def test_every_type_comes_back(
    connection: Connection, first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]
) -> None:
    assert copied(connection, frame_of(first), frame_of(second)) == first + second


def test_many_rows_and_values_above_64_kilobytes_come_back(connection: Connection) -> None:
    values: list[tuple[Any, ...]] = [
        (i, -i, i << 33, [], list(range(i % 5)), [i], "né\n" * (i % 90) if i % 3 else None, "東京")
        for i in range(3_000)
    ]
    long: tuple[Any, ...] = (0, 0, 0, [], list(range(70_000)), [], "ß東😀" * 30_000, "")
    assert copied(connection, frame_of(values), frame_of([long, long])) == [*values, long, long]


def test_columns_in_another_order_and_of_any_integer_type(connection: Connection) -> None:
    frame = pl.DataFrame(
        {
            "i8": pl.Series([0, (1 << 63) - 1], dtype=pl.UInt64),
            "left_out": ["x", "y"],
            "i2": pl.Series([255, 0], dtype=pl.UInt8),
        }
    )
    with connection.transaction():
        connection.execute(TABLE)
        copy_frames(connection, "copied", ("i2", "i8"), [frame])
        found = connection.execute("SELECT i2, i8, i4, t FROM copied").fetchall()
    assert found == [(255, 0, None, None), (0, (1 << 63) - 1, None, None)]


def test_an_error_leaves_nothing(connection: Connection) -> None:
    def frames() -> Iterator[pl.DataFrame]:
        yield pl.DataFrame({"t": np.full(100_000, "x")})
        raise RuntimeError("half-way")

    with connection.transaction():
        connection.execute(TABLE)
        with pytest.raises(RuntimeError, match="half-way"), connection.transaction():
            copy_frames(connection, "copied", ("t",), frames())
        assert connection.execute("SELECT count(*) FROM copied").fetchone() == (0,)
