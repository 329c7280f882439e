"""Everything that needs a GPU, in one command: `make gpu`, or `python -m benchmarks.gpu`.

Parts, each at most nine minutes long; `curve` and `decode` are run for each shape:

tests       all tests marked `gpu`: CUDA graphs, dense states, batches in float32 and float64
curve       milliseconds per pass by texts and rows, with and without candidates
decode      tokens per second of 1B and 8B shapes with forced outputs, by batch size, drafts and planner

Each prints a table and writes OUT/PART.json, cell by cell. Complete parts are skipped, others resumed, so repeat the
command until nothing is left; `--again` starts over. Without a GPU, everything runs on the CPU: add `--quick`. The last
line of stdout is one JSON document; exit status 1 if a cell or a test failed.

Examples:
    python -m benchmarks.gpu --quick                                 # toy size, minutes on a CPU
    python -m benchmarks.gpu --work data/gpu --parts tests,curve
    python -m benchmarks.gpu --work data/gpu --parts decode-8b
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import RESULTS, add_arguments, open_workspace
from benchmarks.gpu import curve, decode, pytests
from benchmarks.gpu.forced import SHAPES
from benchmarks.gpu.sheet import Bench, Sheet, describe_device, read_sheet
from benchmarks.measure import progress
from benchmarks.report import show_rows

PARTS: dict[str, Callable[[Sheet], None]] = {
    "tests": pytests.run,
    "curve": curve.run,
    "decode": decode.run,
}
SHAPED = ("curve", "decode")


def units_of(parts: Sequence[str], shapes: Sequence[str]) -> list[tuple[str, str]]:
    """Return part and shape of each run: `decode` means all shapes, `decode-8b` one."""
    units = []
    for text in parts:
        part, _, shape = text.partition("-")
        units += [(part, each) for each in (([shape] if shape else shapes) if part in SHAPED else [""])]
    return units


def run_unit(bench: Bench, part: str, shape: str, about: dict[str, Any]) -> dict[str, Any]:
    """Run one part unless it is complete; return its state."""
    args, name = bench.args, f"{part}_{shape}" if shape else part
    path = args.out / f"{name}.json"
    if read_sheet(path).get("complete") and not args.again:
        progress(f"{name}: complete")
        return {"part": name, "skipped": True}
    sheet = Sheet(bench, path, about | {"part": part, "shape": shape, "quick": args.quick}, shape)
    PARTS[part](sheet)
    sheet.save(complete=sheet.complete)
    show_rows(name, [{"cell": cell, **found} for cell, found in sheet.cells.items()])
    errors = [cell for cell, found in sheet.cells.items() if "error" in found or found.get("failed")]
    return {"part": name, "complete": sheet.complete, "left": sheet.cut, "errors": errors}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add_arguments(parser)
    parser.set_defaults(out=RESULTS / "gpu")
    split: Callable[[str], tuple[str, ...]] = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument(
        "--parts", type=split, default=tuple(PARTS),
        help=f"any of {','.join(PARTS)}, or of one shape, as decode-8b (default: all)",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure completed cells again")
    args = parser.parse_args(arguments)
    known = {*PARTS, *(f"{part}-{shape}" for part in SHAPED for shape in SHAPES)}
    if unknown := set(args.parts) - known:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(sorted(known))}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts and finish with the JSON document."""
    args = parse_arguments(arguments)
    with open_workspace(args) as space:
        bench, about = Bench(space, args), describe_device()
        units = units_of(args.parts, bench.extent.shapes)
        states = [run_unit(bench, part, shape, about) for part, shape in units]
    print(json.dumps(about | {"quick": args.quick, "parts": states}))
    if any(state.get("errors") for state in states):
        sys.exit(1)


if __name__ == "__main__":
    main()
