"""Rows from arrays arrive in PostgreSQL as they were, whatever their types, sizes and number."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schema import copying
from schema.copying import Blobs, Column, IntegerLists, Integers, blobs, encode, offsets_of, texts

Connection = psycopg.Connection[Any]
TABLE = (
    "CREATE TEMPORARY TABLE copied (i2 smallint, i4 integer, i8 bigint, l2 smallint[], l4 integer[], l8 bigint[],"
    ' b bytea, t text, c text COLLATE "C") ON COMMIT DROP'
)
NAMES = ("i2", "i4", "i8", "l2", "l4", "l8", "b", "t", "c")
KINDS = ("int2", "int4", "int8", "_int2", "_int4", "_int8", "bytea", "text", "text")


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
    others = [st.none() | st.binary(), st.none() | text, text]
    return st.lists(st.tuples(*numbers, *lists, *others), max_size=8)


def column_of(values: Sequence[Any], kind: str) -> Column:
    """Make a column of Python values."""
    if kind.startswith("_"):
        flat = [item for value in values for item in value]
        return IntegerLists(
            np.array(flat, np.int64), offsets_of(np.array([len(value) for value in values], int))
        )
    if kind.startswith("int"):
        return Integers(np.array(values, np.int64))
    return texts(values) if kind == "text" else blobs(values)


def columns_of(values: Sequence[tuple[Any, ...]]) -> list[Column]:
    return [column_of([row[place] for row in values], kind) for place, kind in enumerate(KINDS)]


def copied(connection: Connection, *batches: Sequence[Column]) -> list[tuple[Any, ...]]:
    """Copy batches into a table that only this transaction sees, and read them back."""
    with connection.transaction():
        connection.execute(TABLE)
        with copying.copying(connection, "copied", NAMES) as copy:
            for batch in batches:
                copy.write(batch)
        return connection.execute("SELECT * FROM copied").fetchall()


@settings(deadline=None, max_examples=60)
@given(rows(), rows())
def test_every_type_comes_back(
    connection: Connection, first: list[tuple[Any, ...]], second: list[tuple[Any, ...]]
) -> None:
    assert copied(connection, columns_of(first), columns_of(second)) == first + second


def test_rows_of_many_chunks_come_back(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_ROWS", 7)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 1_000)
    random = np.random.default_rng(0)
    values: list[tuple[Any, ...]] = [
        (i, -i, i << 33, [], list(range(i % 5)), [i], random.bytes(i * 7 % 2_000), "né\n" * (i % 90), "東京")
        for i in range(300)
    ]
    assert copied(connection, columns_of(values)) == values


def test_chunks_are_whole_rows_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 1_000)
    sizes = [10, 20, 5_000, 0, 900, 900, 1_200]
    chunks = list(encode([blobs([bytes(size) for size in sizes])], ["bytea"]))
    # Two bytes of field count and four of length in front of each.
    assert [len(chunk) for chunk in chunks] == [16 + 26, 5_006, 6 + 906, 906, 1_206]


def test_values_above_64_kilobytes(connection: Connection) -> None:
    value = np.random.default_rng(0).bytes(5_000_000)
    text = "ß東😀" * 30_000
    row: tuple[Any, ...] = (0, 0, 0, [], list(range(70_000)), [], value, text, "")
    assert copied(connection, columns_of([row, row])) == [row, row]


def test_no_rows_at_all(connection: Connection) -> None:
    assert copied(connection) == []
    assert copied(connection, columns_of([])) == []


def test_arrays_of_any_integer_type_and_layout(connection: Connection) -> None:
    wide = np.arange(40, dtype=np.uint16).reshape(10, 4)
    with connection.transaction():
        connection.execute(TABLE)
        with copying.copying(connection, "copied", ("i4", "i8", "l4")) as copy:
            tokens = IntegerLists(wide.ravel(), np.arange(11) * 4)
            copy.write([Integers(wide[:, 1]), Integers(wide[::-1, 0].astype(">u4")), tokens])
        found = connection.execute("SELECT i4, i8, l4 FROM copied").fetchall()
    assert found == [(4 * i + 1, 36 - 4 * i, list(range(4 * i, 4 * i + 4))) for i in range(10)]


def test_null_where_bytes_are_not_present(connection: Connection) -> None:
    column = Blobs(np.frombuffer(b"abcdef", np.uint8), np.array([0, 2, 4, 6]), np.array([True, False, True]))
    with connection.transaction():
        connection.execute(TABLE)
        with copying.copying(connection, "copied", ("b", "t")) as copy:
            copy.write([column, column])
        assert connection.execute("SELECT b, t FROM copied").fetchall() == [
            (b"ab", "ab"),
            (None, None),
            (b"ef", "ef"),
        ]


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("i2", Integers(np.array([1, 1 << 15])), "16 bits"),
        ("i4", Integers(np.array([-(1 << 31) - 1])), "32 bits"),
        ("l4", IntegerLists(np.array([1 << 31]), np.array([0, 1])), "32 bits"),
        ("i8", Integers(np.array([1 << 63], np.uint64)), "64 bits"),
        ("t", Integers(np.array([1])), "type text cannot take integers"),
        ("i4", blobs([b"x"]), "type int4 cannot take bytes"),
        ("b", IntegerLists(np.array([1]), np.array([0, 1])), "type bytea cannot take lists"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    connection: Connection, name: str, column: Column, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        copy_one(connection, name, column)
    assert connection.execute("SELECT 1").fetchone() == (1,)


def copy_one(connection: Connection, name: str, column: Column) -> None:
    with connection.transaction():
        connection.execute(TABLE)
        with copying.copying(connection, "copied", (name,)) as copy:
            copy.write([column])


def test_wrong_shapes_are_refused(connection: Connection) -> None:
    with pytest.raises(ValueError, match="equal lengths"):
        list(encode([blobs([b""]), blobs([])], ["bytea", "bytea"]))
    with pytest.raises(ValueError, match="equal lengths"):
        list(encode([blobs([b""])], ["bytea", "bytea"]))
    with connection.transaction():
        connection.execute(TABLE)
        with pytest.raises(ValueError, match="no column nope: it has i2"):
            copying.column_kinds(connection, "copied", ("i2", "nope"))


def test_an_error_leaves_nothing(connection: Connection) -> None:
    with connection.transaction():
        connection.execute(TABLE)
        with pytest.raises(RuntimeError, match="half-way"):
            copy_half(connection)
        assert connection.execute("SELECT count(*) FROM copied").fetchone() == (0,)


def copy_half(connection: Connection) -> None:
    with connection.transaction(), copying.copying(connection, "copied", ("b",)) as copy:
        copy.write([blobs([b"x"] * 100_000)])
        raise RuntimeError("half-way")
