"""The report page of `benchmarks.gpu`: Markdown with pictures, drawn from the files of the parts alone."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode_runs import LOOP
from benchmarks.gpu_decode import PLANNED, speedups
from benchmarks.gpu_host import GOAL as HOST_GOAL
from benchmarks.gpu_sheet import read_sheet
from benchmarks.report import new_axes
from draftstore.decoding.curve import CostCurve

PAGE = "report.md"
GOALS = {1: 2.5, 8: 1.7}
"""Least speedup of planned drafts over plain generate, by texts at a time; see `LEAST` for all others."""
GOAL_SHAPE = "8b"
LEAST = 0.98
Cells = dict[str, dict[str, Any]]


def write_report(folder: Path) -> Path:
    """Draw the page of a folder of parts.

    Raises:
        SystemExit: there is no part.
    """
    sheets = {path.stem: read_sheet(path) for path in sorted(folder.glob("*.json"))}
    if not sheets:
        raise SystemExit(f"no figures in {folder}: run `python -m benchmarks.gpu` first")
    blocks = ["# Figures of a GPU", "Drawn by `python -m benchmarks.gpu --report`.", _about(sheets)]
    for name, sheet in sheets.items():
        blocks.append(f"## {name.replace('_', ', ')}")
        blocks += DRAWN[sheet["part"]](folder, name, sheet["cells"])
        errors = [(cell, found["error"]) for cell, found in sheet["cells"].items() if "error" in found]
        if errors:
            blocks.append(_table(("failed", "error"), errors))
    page = folder / PAGE
    page.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return page


def _about(sheets: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            name, sheet["date"], sheet["device"]["name"], sheet["versions"].get("torch", ""),
            sheet["versions"].get("transformers", ""), "yes" if sheet["complete"] else "no", sheet["quick"],
        )
        for name, sheet in sheets.items()
    ]  # fmt: skip
    return _table(("part", "date", "device", "torch", "transformers", "complete", "toy size"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _well(cells: Cells) -> list[dict[str, Any]]:
    return [cell for cell in cells.values() if "error" not in cell]


def _tests(_folder: Path, _name: str, cells: Cells) -> list[str]:
    rows = [
        (name, cell["tests"], cell["passed"], cell["skipped"], ", ".join(cell["failed"]) or "none")
        for name, cell in cells.items()
        if "error" not in cell
    ]
    return [_table(("file", "tests", "passed", "skipped", "failed"), rows)]


def _curve(folder: Path, name: str, cells: Cells) -> list[str]:
    """Draw milliseconds over rows: a line for each number of texts, with the roofline dashed.

    Foretold is what the planner expects of several texts from the curve of one.
    """
    passes = [cell for cell in _well(cells) if "way" in cell]
    blocks = []
    for context in sorted({cell["context"] for cell in passes}):
        own = [cell for cell in passes if cell["context"] == context and cell["way"] == "graphs"]
        figure, axes = new_axes(f"{name}: a pass after {context} tokens", "rows of each text", "milliseconds")
        for texts in sorted({cell["texts"] for cell in own}):
            line = [cell for cell in own if cell["texts"] == texts]
            x = [cell["rows"] for cell in line]
            (drawn,) = axes.plot(
                x, [cell["milliseconds"] for cell in line], marker="o", label=f"{texts} texts"
            )
            if all("roofline_milliseconds" in cell for cell in line):
                floor = [cell["roofline_milliseconds"] for cell in line]
                axes.plot(x, floor, linestyle="--", linewidth=0.8, color=drawn.get_color())
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(frameon=False)
        picture = f"{name}_{context}.png"
        figure.savefig(folder / picture, dpi=120)
        blocks.append(f"![milliseconds of a pass after {context} tokens; dashed: the roofline]({picture})")
    rows: dict[tuple[int, int, int], dict[str, Any]] = {}
    for cell in passes:
        size = (cell["context"], cell["texts"], cell["rows"])
        least = {"roofline": cell.get("roofline_milliseconds", "")}
        rows.setdefault(size, {}).update({cell["way"]: cell["milliseconds"]} | least)
    for (context, texts, count), row in rows.items():
        alone = {k[2]: v["graphs"] for k, v in rows.items() if k[:2] == (context, 1) and "graphs" in v}
        if 1 in alone:
            curve = CostCurve(tuple(alone), tuple(alone.values()), padded=True)
            row["predicted"] = round(float(curve.costs(texts, count)[-1]), 3)
    ways = ("graphs", "predicted", "eager", "flex", "roofline")
    lines = [(*size, *(row.get(way, "") for way in ways)) for size, row in rows.items()]
    blocks.append(_table(("tokens before", "texts", "rows", *(f"{way}, ms" for way in ways)), lines))
    return [*blocks, *_attention(cells)]


def _attention(cells: Cells) -> list[str]:
    """Show attention alone."""
    alone = [cell for cell in _well(cells) if "ways" in cell]
    if not alone:
        return []
    names = list(alone[0]["ways"])
    lines = [
        (cell["texts"], cell["rows"], cell["width"],
         *(cell["ways"][name].get("microseconds", "failed") for name in names))
        for cell in alone
    ]  # fmt: skip
    columns = ("texts", "rows", "columns", *(f"{name}, µs" for name in names))
    return ["Attention of one layer:", _table(columns, lines)]


def _decode(folder: Path, name: str, cells: Cells) -> list[str]:
    """Draw speedups over plain generate by texts at a time."""
    rows = speedups({key: cell for key, cell in cells.items() if "error" not in cell})
    figure, axes = new_axes(f"{name}: forced outputs", "texts at a time", "speed, plain generate = 1")
    for way in dict.fromkeys(row["way"] for row in rows if not row["way"].startswith("plain")):
        line = [row for row in rows if row["way"] == way and "over_plain" in row]
        axes.plot([row["texts"] for row in line], [row["over_plain"] for row in line], marker="o", label=way)
    axes.set_xscale("log", base=2)
    axes.legend(frameon=False)
    figure.savefig(folder / f"{name}.png", dpi=120)
    keys = (
        "texts", "way", "tokens_per_second", "over_plain", "over_loop", "accepted_length", "nodes", "texts_a_pass",
        "milliseconds_a_pass", "draft_share",
    )  # fmt: skip
    table = _table(
        [key.replace("_", " ") for key in keys], [[row.get(key, "") for key in keys] for row in rows]
    )
    return [f"![speed by texts at a time]({name}.png)", *_verdicts(name, rows), table]


def _verdicts(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say whether the goals were reached."""
    planned = [row for row in rows if row["way"].endswith(PLANNED) and "over_plain" in row]
    if not planned:
        return []
    found = []
    if name.endswith(GOAL_SHAPE):
        for texts, goal in GOALS.items():
            best = max((row["over_plain"] for row in planned if row["texts"] == texts), default=None)
            if best is not None:
                found.append(
                    f"- {texts} texts: {best} of plain generate; the goal is {goal}: {_verdict(best, goal)}"
                )
    for key, other in (("over_plain", "plain generate"), ("over_loop", LOOP)):
        least = min(planned, key=lambda row: row.get(key, 9.9))
        if key in least:
            found.append(
                f"- least speed of planned drafts over {other}: {least[key]} ({least['texts']} texts, {least['way']}); "
                f"the goal is {LEAST}: {_verdict(least[key], LEAST)}"
            )
    return ["\n".join(found)]


def _verdict(value: float, goal: float) -> str:
    return "reached" if value >= goal else "NOT reached"


def _live(cells: Cells) -> list[str]:
    """Show live decoding."""
    rows = speedups({key: cell for key, cell in cells.items() if "tokens_per_second" in cell})
    keys = (
        "texts",
        "way",
        "tokens_per_second",
        "over_plain",
        "accepted_length",
        "nodes",
        "identical",
        "outputs",
        "excused",
    )
    return [
        _table([key.replace("_", " ") for key in keys], [[row.get(key, "") for key in keys] for row in rows])
    ]


def _recycling(_folder: Path, _name: str, cells: Cells) -> list[str]:
    costs = [
        (
            cell["shape"],
            cell["texts"],
            cell["rows"],
            cell["best_milliseconds"],
            cell["candidates_milliseconds"],
        )
        for cell in _well(cells)
        if "candidates_milliseconds" in cell
    ]
    columns = ("shape", "texts", "rows", "a pass, ms", "with 8 candidates of each row, ms")
    return [_table(columns, costs), "Live:", *_live(cells)]


def _dresd(_folder: Path, _name: str, cells: Cells) -> list[str]:
    read = [
        (cell["shape"], cell["whole_states_per_second"], cell["projected_states_per_second"])
        for cell in _well(cells)
        if "projected_states_per_second" in cell
    ]
    blocks = [_table(("shape", "states/s", "projected states/s"), read)]
    store = cells.get("store", {})
    if "seconds" in store:
        entries, steps = store["counts"]["entries"], store["ended_at"]
        blocks.append(
            f"A store of {entries:,} entries: {store['seconds']} s from text to drafts; steps ended at {steps}."
        )
    if "drafters" in (replay := cells.get("replay", {})):
        budgets = list(next(iter(replay["drafters"].values())))
        lines = [
            (name, *(by_nodes[nodes]["accepted_length"] for nodes in budgets))
            for name, by_nodes in replay["drafters"].items()
        ]
        blocks += ["Accepted length by nodes:", _table(("drafter", *budgets), lines)]
    return [*blocks, "Live:", *_live(cells)]


def _host(_folder: Path, _name: str, cells: Cells) -> list[str]:
    rows = [
        (cell["texts"], cell["way"], cell["step_us"]["p50"], cell["host_share"], cell["drafting_share"],
         "reached" if cell["host_share"] <= HOST_GOAL else "NOT reached")
        for cell in _well(cells)
        if "host_share" in cell
    ]  # fmt: skip
    columns = ("texts", "way", "a step, µs (median)", "host share", "of that drafting", f"goal {HOST_GOAL}")
    return [_table(columns, rows)]


DRAWN: dict[str, Callable[[Path, str, Cells], list[str]]] = {
    "tests": _tests,
    "curve": _curve,
    "decode": _decode,
    "recycling": _recycling,
    "dresd": _dresd,
    "host": _host,
}
