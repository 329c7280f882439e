"""Everything that needs a GPU, in one command: `make gpu`, or `python -m benchmarks.gpu`.

Parts, each at most nine minutes long; those of a shape are run for each of them:

tests       all tests marked `gpu`: CUDA graphs, dense states, batches in float32 and float64
curve       milliseconds of a pass by texts and rows: graphs, eager, the roofline
decode      tokens a second of 1B and 8B shapes with forced outputs, by texts at a time, drafts and planner
recycling   what candidates cost, and Token Recycling live
dresd       states read a second, a store of 2 M entries, its drafts live beside REST

Each writes OUT/PART.json, cell by cell. A part that is complete is skipped, another one is continued, so the command
is repeated until nothing is left; `--again` begins anew. Without a GPU everything runs on the CPU: add `--quick`. The
last line of stdout is one JSON document; exit status 1 if a cell or a test failed.

Examples:
    python -m benchmarks.gpu --quick                                 # toy size, minutes on a CPU
    python -m benchmarks.gpu --prepare data/kit --wheels DIR         # what a GPU machine needs, to carry there
    python -m benchmarks.gpu --kit data/kit --work data/gpu --parts tests,curve      # there
    python -m benchmarks.gpu --kit data/kit --work data/gpu --parts decode-8b
    python -m benchmarks.gpu --report                                # writes OUT/report.md
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, add_arguments, open_workspace
from benchmarks.gpu import curve, decode, pytests
from benchmarks.gpu.forced import SHAPES
from benchmarks.gpu.kit import prepare
from benchmarks.gpu.report import write_report
from benchmarks.gpu.sheet import Bench, Sheet, describe_device, read_sheet
from benchmarks.measure import progress
from benchmarks.smollm import add_model_argument

PARTS: dict[str, Callable[[Sheet], None]] = {
    "tests": pytests.run,
    "curve": curve.run,
    "decode": decode.run_forced,
    "recycling": decode.run_recycling,
    "dresd": decode.run_dense,
}
SHAPED = ("curve", "decode")
MINUTES = 8.5
"""After so many a part begins no further cell, so that the last one ends within nine."""


class Unit(NamedTuple):
    """A part in one shape; parts without shapes have none."""

    part: str
    shape: str

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.part}_{self.shape}" if self.shape else self.part


def units_of(parts: Sequence[str], shapes: Sequence[str]) -> list[Unit]:
    """Return what is run: `decode` stands for all shapes, `decode-8b` for one."""
    units = []
    for text in parts:
        part, _, shape = text.partition("-")
        chosen = [shape] if shape else list(shapes)
        units += [Unit(part, each) for each in (chosen if part in SHAPED else [""])]
    return units


def run_unit(bench: Bench, unit: Unit, about: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run one part, unless it is complete; return its state."""
    path = args.out / f"{unit.name}.json"
    if read_sheet(path).get("complete") and not args.again:
        progress(f"{unit.name}: complete")
        return {"part": unit.name, "skipped": True}
    known = {"part": unit.part, "shape": unit.shape, "quick": args.quick}
    sheet = Sheet(bench, path, about | known, unit.shape)
    with sheet.whole():
        PARTS[unit.part](sheet)
    errors = [name for name, cell in sheet.cells.items() if "error" in cell or cell.get("failed")]
    return {
        "part": unit.name,
        "complete": sheet.complete,
        "cells": len(sheet.cells),
        "left": sheet.cut,
        "errors": errors,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add_arguments(parser, code=True)
    add_model_argument(parser)
    parser.set_defaults(out=RESULTS / "gpu")
    split: Callable[[str], tuple[str, ...]] = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument(
        "--parts", type=split, default=tuple(PARTS),
        help=f"any of {','.join(PARTS)}, or of one shape, as decode-8b (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--shapes", type=split, help=f"any of {','.join(SHAPES)} (default: 1b,8b; tiny with --quick)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="of a part; it begins no cell after them (default: %(default)s)",
    )
    parser.add_argument("--again", action="store_true", help="measure what is there already")
    parser.add_argument("--kit", type=Path, help="folder made by --prepare: data and model come from there")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="write the folder for --kit, and end")
    parser.add_argument("--report", action="store_true", help="write the page of what is in OUT, and end")
    args = parser.parse_args(arguments)
    known = {*PARTS, *(f"{part}-{shape}" for part in SHAPED for shape in SHAPES)}
    for what, given, accepted in (("parts", args.parts, known), ("shapes", args.shapes or (), {*SHAPES})):
        if unknown := set(given) - accepted:
            parser.error(
                f"unknown {what} {', '.join(sorted(unknown))}: choose from {', '.join(sorted(accepted))}"
            )
    if args.kit is not None:
        args.data = args.kit / "data"
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts, and finish with the JSON document."""
    args = parse_arguments(arguments)
    if args.report:
        print(json.dumps({"report": str(write_report(args.out))}))
        return
    with open_workspace(args) as space:
        if args.prepare:
            print(
                json.dumps(
                    {"kit": str(args.prepare), "bytes": prepare(space.data, args.wheels, args.prepare)}
                )
            )
            return
        bench, about = Bench(space, args), describe_device()
        units = units_of(args.parts, bench.extent.shapes)
        states = [run_unit(bench, unit, about, args) for unit in units]
    print(json.dumps(about | {"quick": args.quick, "parts": states}))
    if any(state.get("errors") for state in states):
        sys.exit(1)


if __name__ == "__main__":
    main()
