"""The report page of `benchmarks.gpu`: Markdown, written from the files of the parts alone."""

from collections.abc import Iterable, Sequence
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
    about = [
        (name, sheet["date"], sheet["device"]["name"], sheet["versions"].get("torch", ""),
         sheet["versions"].get("transformers", ""), "yes" if sheet["complete"] else "no", sheet["quick"])
        for name, sheet in sheets.items()
    ]  # fmt: skip
    blocks.append(_table(("part", "date", "device", "torch", "transformers", "complete", "toy size"), about))
    for name, sheet in sheets.items():
        blocks.append(f"## {name.replace('_', ', ')}")
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


def _tables(cells: Cells) -> Iterable[str]:
    """Yield a table for each run of cells with the same figures."""
    group: Cells = []
    for cell in [*cells, None]:
        if group and (cell is None or not _alike(group[0], cell)):
            keys = list(dict.fromkeys(key for each in group for key in each))
            rows = [[each.get(key, "") for key in keys] for each in group]
            yield _table([key.replace("_", " ") for key in keys], rows)
            group = []
        if cell is not None:
            group.append(cell)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two cells belong into a table."""
    return ("error" in one) == ("error" in other) and ("way" in one) == ("way" in other)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
