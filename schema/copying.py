"""Bulk loading: rows that stand in arrays go into PostgreSQL by binary COPY, without a Python loop over rows.

A batch of rows is a column each of `Integers`, `Blobs` (bytea or text) and `IntegerLists` (int4[] and the like).
Kernels lay the rows out as COPY wants them, a few megabytes at a time, so that memory stays bounded whatever the
number of rows:

    with copying(connection, "trees_7", ("build_id", "key", "value")) as copy:
        copy.write([Integers(np.full(2, 7)), blobs([b"ab", b"cd"]), blobs([b"tree", b"tree"])])

The widths of integers are those of the table's columns, which are asked first: binary COPY converts nothing.

Rows of lists, text and numbers go in some seven times faster so than through psycopg's `write_row`. Rows that exist
as Python objects anyway, such as keys and values from an iterator, are better sent by `write_row`: see
`schema.crest_loading`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql

from draftstore.jit import kernel, read_only

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
CHUNK_ROWS = 1 << 16
CHUNK_BYTES = 1 << 22

INTEGER_WIDTHS = {"int2": 2, "int4": 4, "int8": 8}
LIST_ELEMENTS = {"_int2": 21, "_int4": 23, "_int8": 20}
BLOB_TYPES = ("bytea", "text", "varchar")


class Column(Protocol):
    """The values of one column for some rows."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def part(self, begin: int, end: int) -> "Column":
        """Return the rows [begin, end), without a copy."""

    def sizes(self, kind: str) -> NDArray[np.int64] | int:
        """Return the bytes that each field takes, its length word included; one number where all take the same.

        Args:
            kind: type of the table's column, as `column_kinds` names it.

        Raises:
            ValueError: such a column cannot take these values.
        """

    def put(self, out: NDArray[np.uint8], at: NDArray[np.int64], kind: str) -> None:
        """Write every field, that of row i at `out[at[i]]`, and move `at` behind them.

        Raises:
            ValueError: a value is out of the column's range.
        """


@dataclasses.dataclass(frozen=True)
class Integers:
    """A smallint, integer or bigint column.

    Attributes:
        values: any integer type [rows].
    """

    values: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.values)

    def part(self, begin: int, end: int) -> "Integers":
        """Return some rows; see `Column`."""
        return Integers(self.values[begin:end])

    def sizes(self, kind: str) -> int:
        """Return the bytes of a field; see `Column`."""
        return 4 + INTEGER_WIDTHS[_expected(kind, tuple(INTEGER_WIDTHS), "integers")]

    def put(self, out: NDArray[np.uint8], at: NDArray[np.int64], kind: str) -> None:
        """Write the fields; see `Column`."""
        width = INTEGER_WIDTHS[kind]
        _put_integers(out, at, _wide(self.values, width), width)


@dataclasses.dataclass(frozen=True)
class Blobs:
    """A bytea or text column: row i is `data[offsets[i]:offsets[i + 1]]`, or NULL where `present` is false.

    Attributes:
        data: uint8 [any]; of a text column, UTF-8 without NUL.
        offsets: int64 [rows + 1], not descending.
        present: bool [rows]; None: no row is NULL.
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    present: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, begin: int, end: int) -> "Blobs":
        """Return some rows; see `Column`."""
        present = None if self.present is None else self.present[begin:end]
        return Blobs(self.data, self.offsets[begin : end + 1], present)

    def sizes(self, kind: str) -> NDArray[np.int64]:
        """Return the bytes of each field; see `Column`."""
        _expected(kind, BLOB_TYPES, "bytes or text")
        lengths: NDArray[np.int64] = np.diff(self.offsets)
        return 4 + (lengths if self.present is None else lengths * self.present)

    def put(self, out: NDArray[np.uint8], at: NDArray[np.int64], kind: str) -> None:  # noqa: ARG002
        """Write the fields; see `Column`."""
        present = np.ones(len(self), np.bool_) if self.present is None else self.present
        _put_blobs(out, at, read_only(self.data), read_only(self.offsets), read_only(present))


@dataclasses.dataclass(frozen=True)
class IntegerLists:
    """An int2[], int4[] or int8[] column: row i is `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: any integer type [any].
        offsets: int64 [rows + 1], not descending.
    """

    values: NDArray[np.integer[Any]]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def part(self, begin: int, end: int) -> "IntegerLists":
        """Return some rows; see `Column`."""
        return IntegerLists(self.values, self.offsets[begin : end + 1])

    def sizes(self, kind: str) -> NDArray[np.int64]:
        """Return the bytes of each field; see `Column`."""
        width = INTEGER_WIDTHS[_expected(kind, tuple(LIST_ELEMENTS), "lists of integers")[1:]]
        lengths = lengths_of(self.offsets)
        # Dimensions, flags and element type; unless the list is empty, its length and first index; elements.
        return 4 + 12 + (lengths > 0) * (8 + lengths * (4 + width))

    def put(self, out: NDArray[np.uint8], at: NDArray[np.int64], kind: str) -> None:
        """Write the fields; see `Column`."""
        width = INTEGER_WIDTHS[kind[1:]]
        begin, end = self.offsets[0], self.offsets[-1]
        values, offsets = _wide(self.values[begin:end], width), read_only(self.offsets - begin)
        _put_lists(out, at, values, offsets, width, LIST_ELEMENTS[kind])


def blobs(values: Sequence[bytes | None]) -> Blobs:
    """Return a column of byte strings."""
    lengths = np.fromiter((len(value or b"") for value in values), np.int64, len(values))
    data = np.frombuffer(b"".join(value or b"" for value in values), np.uint8)
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return Blobs(data, offsets_of(lengths), None if present.all() else present)


def texts(values: Sequence[str | None]) -> Blobs:
    """Return a column of texts."""
    return blobs([None if value is None else value.encode() for value in values])


def offsets_of(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return where each of several runs begins, and the end of the last: int64 [runs + 1]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def lengths_of(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lengths of runs, from where they begin and end: int64 [runs]."""
    return offsets[1:] - offsets[:-1]


class RowCopy:
    """A COPY under way."""

    def __init__(self, copy: psycopg.Copy, kinds: Sequence[str]) -> None:
        self._copy = copy
        self._kinds = kinds

    def write(self, columns: Sequence[Column]) -> None:
        """Send a batch of rows of any size.

        Args:
            columns: in the order of the names given to `copying`, all of one length.

        Raises:
            ValueError: columns of several lengths, or of a kind that the table does not have there, or an
                integer too large for its column.
        """
        for chunk in encode(columns, self._kinds):
            self._copy.write(chunk)


@contextmanager
def copying(
    connection: psycopg.Connection[Any], table: str, names: Sequence[str], *, freeze: bool = False
) -> Iterator[RowCopy]:
    """Open a binary COPY into a table; an exception inside the block undoes it.

    Args:
        connection: where; nothing else can run on it inside the block.
        table: its name.
        names: the columns that are sent; others get their defaults.
        freeze: write rows as if vacuumed already, which PostgreSQL allows for a table made in this transaction.
    """
    kinds = column_kinds(connection, table, names)
    with connection.cursor() as cursor, cursor.copy(copy_statement(table, names, freeze=freeze)) as copy:
        copy.write(HEADER)
        yield RowCopy(copy, kinds)
        copy.write(TRAILER)


def copy_statement(table: str, names: Sequence[str], *, freeze: bool = False) -> sql.Composed:
    """Return the statement of a binary COPY into a table; for the arguments see `copying`."""
    return sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary, FREEZE {})").format(
        sql.Identifier(table), sql.SQL(", ").join(map(sql.Identifier, names)), sql.Literal(freeze)
    )


def column_kinds(connection: psycopg.Connection[Any], table: str, names: Sequence[str]) -> list[str]:
    """Return PostgreSQL's internal names of the types of columns: `int4`, `_int4` for int4[], `bytea`.

    Raises:
        psycopg.errors.UndefinedTable: no such table.
        ValueError: no such column.
    """
    rows = connection.execute(
        "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid"
        " WHERE attrelid = quote_ident(%s)::regclass AND attnum > 0 AND NOT attisdropped",
        (table,),
    ).fetchall()
    kinds: dict[str, str] = dict(rows)
    missing = [name for name in names if name not in kinds]
    if missing:
        raise ValueError(f"the table {table} has no column {', '.join(missing)}: it has {', '.join(kinds)}")
    return [kinds[name] for name in names]


def encode(columns: Sequence[Column], kinds: Sequence[str]) -> Iterator[memoryview]:
    """Yield rows in PostgreSQL's binary COPY format, without header and trailer, in chunks of whole rows.

    A chunk has at most `CHUNK_BYTES`, unless a single row has more.

    Args:
        columns: all of one length.
        kinds: the type of each, as `column_kinds` names it.
    """
    lengths = {len(column) for column in columns}
    if len(lengths) != 1 or len(columns) != len(kinds):
        raise ValueError(
            f"columns of {sorted(lengths)} rows for {len(kinds)} names: expected one column for each, of equal lengths"
        )
    for begin in range(0, lengths.pop(), CHUNK_ROWS):
        yield from _encode_block([column.part(begin, begin + CHUNK_ROWS) for column in columns], kinds)


def _encode_block(columns: Sequence[Column], kinds: Sequence[str]) -> Iterator[memoryview]:
    """Yield rows, few enough to measure them all at once, as `encode` does."""
    sizes = np.full(len(columns[0]), 2, np.int64)
    for column, kind in zip(columns, kinds, strict=True):
        sizes += column.sizes(kind)
    places = offsets_of(sizes)
    begin = 0
    while begin < len(sizes):
        fitting = int(np.searchsorted(places, places[begin] + CHUNK_BYTES, side="right")) - 1
        end = max(fitting, begin + 1)
        out = np.empty(places[end] - places[begin], np.uint8)
        at = places[begin:end] - places[begin]
        _put_field_counts(out, at, len(columns))
        for column, kind in zip(columns, kinds, strict=True):
            column.part(begin, end).put(out, at, kind)
        yield out.data
        begin = end


def _expected(kind: str, accepted: Sequence[str], what: str) -> str:
    """Return the type of a column if it is one that can take some values."""
    if kind not in accepted:
        raise ValueError(f"a column of type {kind} cannot take {what}: expected one of {', '.join(accepted)}")
    return kind


def _wide(values: NDArray[np.integer[Any]], width: int) -> NDArray[np.int64]:
    """Return integers as int64, after a look whether they fit the column."""
    limit = 1 << (8 * width - 1)
    if len(values) and not (-limit <= int(values.min()) and int(values.max()) < limit):
        raise ValueError(
            f"integers from {values.min()} to {values.max()}: the column takes {8 * width} bits with sign"
        )
    return read_only(values.astype(np.int64))


@kernel
def _put_big_endian(out: Any, at: Any, value: Any, width: Any) -> Any:
    """Write an integer of some bytes, highest first; return the place behind it."""
    for i in range(width):
        out[at + i] = (value >> (8 * (width - 1 - i))) & 0xFF
    return at + width


@kernel
def _put_field_counts(out: Any, at: Any, count: Any) -> None:
    """Write the number of fields in front of every row."""
    for row in range(len(at)):
        at[row] = _put_big_endian(out, at[row], count, 2)


@kernel
def _put_integers(out: Any, at: Any, values: Any, width: Any) -> None:
    """Write an integer field for every row."""
    for row in range(len(at)):
        place = _put_big_endian(out, at[row], width, 4)
        at[row] = _put_big_endian(out, place, values[row], width)


@kernel
def _put_blobs(out: Any, at: Any, data: Any, offsets: Any, present: Any) -> None:
    """Write a field of bytes for every row, or NULL."""
    for row in range(len(at)):
        if not present[row]:
            at[row] = _put_big_endian(out, at[row], -1, 4)
            continue
        begin, end = offsets[row], offsets[row + 1]
        place = _put_big_endian(out, at[row], end - begin, 4)
        for i in range(begin, end):
            out[place + i - begin] = data[i]
        at[row] = place + end - begin


@kernel
def _put_lists(out: Any, at: Any, values: Any, offsets: Any, width: Any, element: Any) -> None:
    """Write an array field for every row: dimensions, flags, element type; length, first index; elements."""
    for row in range(len(at)):
        begin, end = offsets[row], offsets[row + 1]
        size = 12 if begin == end else 20 + (end - begin) * (4 + width)
        place = _put_big_endian(out, at[row], size, 4)
        place = _put_big_endian(out, place, 0 if begin == end else 1, 4)
        place = _put_big_endian(out, place, 0, 4)
        place = _put_big_endian(out, place, element, 4)
        if begin < end:
            place = _put_big_endian(out, place, end - begin, 4)
            place = _put_big_endian(out, place, 1, 4)
        for i in range(begin, end):
            place = _put_big_endian(out, place, width, 4)
            place = _put_big_endian(out, place, values[i], width)
        at[row] = place
