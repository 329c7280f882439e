"""Presentation of results: tables, pictures, the machine, and one JSON document as the last line."""

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import psutil
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

PACKAGES = ("draftstore", "numpy", "numba", "tokenizers")
TABLE_WIDTH = 150


def describe_machine(extra_packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return date, CPU, cores, memory and versions of the installed packages."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, *extra_packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "system": platform.system(),
        },
        "versions": versions,
    }


def _cpu_model() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


def show_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the figures that any row has; lists are shown by their lengths."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[row.get(key, "") for key in keys] for row in rows]
    counted = [[len(cell) if isinstance(cell, list | dict) else cell for cell in row] for row in cells]
    show_table(title, [key.replace("_", " ") for key in keys], counted)


def _cell(value: object) -> str:
    """Format a number with a readable number of digits."""
    if isinstance(value, float):
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def new_axes(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """Start a picture in the common style of the benchmarks."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, fontsize="medium")
    axes.grid(visible=True, axis="y", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_svg(figure: Figure, path: Path) -> None:
    """Write a picture reproducibly: equal figures give equal bytes."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draftstore", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def save(out: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write figures to `out/name.json`, one per line."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    (out / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def finish(out: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write the figures of a whole program to `out/name.json` and print them as the last line."""
    save(out, name, document)
    print(json.dumps(document))
