"""Output of commands: lines, tables, JSON and CSV. All untrusted text reaches the terminal through this module.

Names, places and reasons come from files and databases: control characters in them, such as terminal escape sequences,
are replaced by visible symbols. JSON and CSV are always UTF-8; tables and drawings fit the terminal's encoding.
"""

import codecs
import csv
import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 160
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""All control characters except line breaks."""
ASCII = str.maketrans("├└│─·␣µ…", "|`|-._u~")
"""Drawings where the encoding lacks their characters; all others become escapes."""

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of a table."
)


def printable(text: str | Path) -> str:
    """Return text that any terminal can show: control characters as symbols, non-UTF-8 bytes escaped."""
    return CONTROL.sub(_picture, click.format_filename(str(text)))


def _picture(found: re.Match[str]) -> str:
    number = ord(found[0])
    return chr(0x2400 + number) if number < 0x20 else "\u2421" if number == 0x7F else f"\\x{number:02x}"


def fit_terminal() -> None:
    """Have stdout and stderr replace the characters that their encoding lacks, as Latin-1 lacks most."""
    codecs.register_error("draftstore", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="draftstore")


def _in_ascii(error: Any) -> tuple[str, int]:
    text = error.object[error.start : error.end].translate(ASCII)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def say(text: str, *, err: bool = False) -> None:
    """Print text with a line break, on stderr if `err`."""
    click.echo(printable(text), err=err)


def print_json(value: Any) -> None:
    """Print a JSON document on one line; non-UTF-8 bytes of paths are escaped."""
    click.echo(json.dumps(json_value(value), ensure_ascii=False).encode(errors="backslashreplace"))


Columns = Mapping[str, str | Callable[[Any], Any]]
"""The source of each column's values by column name: a key of the rows, or a function of a row."""


def print_rows(
    rows: Sequence[Mapping[str, Any]], columns: Columns, as_json: bool, *, empty: str = ""
) -> None:
    """Print rows as JSON, or some of their fields as a table; `empty` is printed if there are none."""
    if as_json:
        return print_json(rows)
    found = [
        [column(row) if callable(column) else row[column] for column in columns.values()] for row in rows
    ]
    return print_table(tuple(columns), found, empty=empty)


def print_result(fields: Mapping[str, Any], as_json: bool, text: str) -> None:
    """Print the result of a command, as JSON or as a sentence."""
    if as_json:
        print_json(fields)
    else:
        say(text)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    empty: str = "",
    plain: bool = False,
    err: bool = False,
) -> None:
    """Print a table, with numbers right-aligned; if it is wider than the terminal, a block of lines for each row.

    `empty` is printed if there are no rows. Numbers are `plain`, without separators, in results of SQL.
    """
    found = list(rows)
    if not found and empty:
        return say(empty, err=err)
    names = [printable(name) for name in columns]
    cells = [[cell(value, plain=plain) for value in row] for row in found]
    table = Table()
    for position, name in enumerate(names):
        numbers = found and all(_is_number(row[position]) for row in found)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    shown = console(err=err)
    unlimited = shown.options.update_width(sys.maxsize)
    if shown.measure(table, options=unlimited).maximum <= shown.width or not cells:
        return shown.print(table)
    for row in cells:
        say("", err=err)
        print_fields(zip(names, row, strict=True), err=err)
    return None


def print_fields(fields: Mapping[str, Any] | Iterable[tuple[str, Any]], *, err: bool = False) -> None:
    """Print labels with their values, one per line, omitting those without a value."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in fields.items() if isinstance(fields, Mapping) else fields:
        if value not in (None, ""):
            table.add_row(printable(label), cell(value))
    console(err=err).print(table)


def print_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print CSV with a header and unformatted values."""
    utf8 = codecs.getwriter("utf-8")(sys.stdout.buffer, "backslashreplace")
    writer = csv.writer(utf8, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_value(value) for value in row] for row in rows)


def console(*, err: bool = False) -> Console:
    """Return the console for results, or for everything else (`err`); text is literal, and tables in files are wide."""
    width = None if (sys.stderr if err else sys.stdout).isatty() else FILE_WIDTH
    return Console(stderr=err, markup=False, highlight=False, emoji=False, width=width)


def cell(value: object, *, plain: bool = False) -> str:
    """Return a value in human-readable form: numbers with separators unless `plain`, times in UTC to the second."""
    match value:
        case None:
            return ""
        case bool():
            return str(value) if plain else "yes" if value else "no"
        case int() if not plain:
            return f"{value:,}"
        case float():
            return f"{value:.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
        case datetime() if not plain:
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        case bytes():
            return f"\\x{value.hex()}"
        case dict():
            return printable(json.dumps(json_value(value), ensure_ascii=False))
        case list() | tuple():
            text = json.dumps(json_value(value), ensure_ascii=False) if plain else ", ".join(map(cell, value))
            return printable(text)
        case _:
            return printable(str(value))


def json_value(value: object) -> Any:
    """Return a value as JSON: integral decimals as integers, times in ISO 8601, bytes as hexadecimal digits."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Decimal():
            if not value.is_finite():
                return str(value)
            return int(value) if value == value.to_integral_value() else float(value)
        case bytes():
            return value.hex()
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [json_value(item) for item in value]
        case datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case date() | time():
            return value.isoformat()
        case _:
            return str(value)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float | Decimal) and not isinstance(value, bool))


def _csv_value(value: object) -> object:
    return cell(value, plain=True) if isinstance(value, bytes | dict | list) else value
