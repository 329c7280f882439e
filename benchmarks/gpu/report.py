"""The report page of `benchmarks.gpu`: Markdown, written from the files of the parts alone."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.sheet import read_sheet

PAGE = "report.md"
Cells = list[dict[str, Any]]


def write_report(folder: Path) -> Path:
    """Write the page of a folder of parts.

    Raises:
        SystemExit: there is no part.
    """
    sheets = {path.stem: read_sheet(path) for path in sorted(folder.glob("*.json"))}
    if not sheets:
        raise SystemExit(f"no figures in {folder}: run `python -m benchmarks.gpu` first")
    blocks = ["# Figures of a GPU", "Written by `python -m benchmarks.gpu --report`."]
    for name, sheet in sheets.items():
        facts = (
            sheet["date"],
            sheet["device"]["name"],
            *(f"{key} {value}" for key, value in sheet["versions"].items()),
        )
        state = "complete" if sheet["complete"] else "not complete"
        blocks += [
            f"## {name.replace('_', ', ')}",
            ", ".join((*facts, "toy size" if sheet["quick"] else "", state)),
        ]
        blocks += _tables(_with_speedups(sheet["cells"]))
    page = folder / PAGE
    page.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return page


def _with_speedups(cells: dict[str, dict[str, Any]]) -> Cells:
    """Return all cells; those with a way of decoding get their speed over plain `generate` of as many texts."""
    found: Cells = [{"cell": name, **cell} for name, cell in cells.items()]
    plain: dict[int, float] = {}
    for cell in found:
        if str(cell.get("way", "")).startswith("plain") and "tokens_per_second" in cell:
            plain[cell["texts"]] = max(plain.get(cell["texts"], 0.0), cell["tokens_per_second"])
    for cell in found:
        if "tokens_per_second" in cell and cell["texts"] in plain:
            cell["over_plain"] = round(cell["tokens_per_second"] / plain[cell["texts"]], 3)
    return found


def _tables(cells: Cells) -> Iterator[str]:
    """Yield a table in Markdown for each run of cells with the same figures."""
    for _, group in itertools.groupby(cells, lambda cell: ("error" in cell, "way" in cell)):
        rows = list(group)
        keys = list(dict.fromkeys(key for row in rows for key in row))
        lines = [[key.replace("_", " ") for key in keys], ["---"] * len(keys)]
        lines += [[str(row.get(key, "")).replace("|", "\\|") for key in keys] for row in rows]
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
