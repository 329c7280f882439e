"""Every system on every replay, over the same texts: `python -m benchmarks.quality`.

Accepted length M (tokens per forward pass) and, for drafts with probabilities, the expected calibration error
(reliability.py in this folder). Systems are in systems.py, recorded outputs in
replays.py. Other libraries are included if installed; see libraries.py. Two pictures, accepted.svg and reliability.svg,
are drawn in docs/ for a full run, otherwise in OUT.

A cell is one system on one replay with drafts of so many nodes, from texts of one size: `sample`, 4.5 M tokens, which
every system can hold, or `whole`, all of ShareGPT or of the code packages. Cells are cached in the work folder while
code and texts are unchanged, so an interrupted run resumes.

Tables first; the last line of stdout is one JSON document, also written to OUT/quality.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.quality --work ~/bench --systems 'REST,stored text' --nodes 16
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    CHAT,
    CODE,
    SIXTH,
    TINY,
    Notes,
    Source,
    Workspace,
    add_arguments,
    chosen,
    open_workspace,
)
from benchmarks.measure import progress
from benchmarks.quality.picture import ALL, draw_lengths, draw_reliability, means_of
from benchmarks.quality.reliability import Reliability, steps_of
from benchmarks.quality.replays import REPLAYS
from benchmarks.quality.systems import LIBRARIES, OURS, SYSTEMS, TEXTLESS, System, Texts, absent
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.loop import Tally
from draftstore.decoding.replay import Recording

NODES, QUICK_NODES = (4, 8, 16, 32, 64), (8, 64)
QUICK_ROWS = 3
SIZES: dict[str, dict[Source, Source]] = {
    "sample": {
        CHAT: SIXTH,
        CODE: Source("code_packages_sixth", CODE.files, tokens=SIXTH.tokens, every=SIXTH.every),
    },
    "whole": {CHAT: CHAT, CODE: CODE},
    "tiny": {CHAT: TINY, CODE: TINY},
}
"""Texts that represent all texts of their kind."""
DOCS = Path("docs")

Cell = dict[str, Any]
"""Figures of one system on one replay, with its coordinates: size, system, replay, nodes."""


class Bench:
    """The texts of one kind and the system being measured, each made when first needed."""

    def __init__(self, workspace: Workspace, source: Source) -> None:
        self._workspace, self._source = workspace, source
        self._held: tuple[str, System] | None = None
        self._recordings: dict[tuple[str, int | None], list[Recording]] = {}

    @cached_property
    def _texts(self) -> Texts:
        return Texts(self._workspace, self._source)

    def measure(self, system: str, replay: str, nodes: int, rows: int | None, **_place: object) -> Cell:
        """Replay outputs with drafts of so many nodes."""
        if (replay, rows) not in self._recordings:
            self._recordings[replay, rows] = REPLAYS[replay].read(self._workspace, rows)
        made = self._system(system, nodes)
        tally, reliability = Tally(), Reliability()
        for recording in self._recordings[replay, rows]:
            for step, coming in steps_of(made.drafter, recording, nodes):
                tally.add(step)
                if system in OURS:
                    reliability.add(step.tree, coming)
        figures = {
            "accepted_length": round(tally.accepted_length, 4),
            "bytes_a_token": round(made.memory / self._texts.tokens, 2),
            "mapped": made.mapped,
        }
        return figures | ({"sums": reliability.sums.tolist()} if system in OURS else {})

    def _system(self, name: str, nodes: int) -> System:
        """Return a system for so many nodes without memory of replays; only one is held at a time."""
        if self._held is None or self._held[0] != name or self._held[1].nodes not in (None, nodes):
            self.close()
            self._held = name, SYSTEMS[name](self._texts, nodes)
            self._held[1].drafter.session(np.array([1, 2])).propose(nodes)  # compiles what it needs
        self._held[1].forget()
        return self._held[1]

    def close(self) -> None:
        """Release the system's resources."""
        if self._held:
            self._held[1].close()
            self._held = None


def run(workspace: Workspace, args: argparse.Namespace) -> list[Cell]:
    """Measure all cells, grouped by kind of text."""
    notes, cells = Notes(workspace.work / "quality"), list[Cell]()
    for size, kind in product(args.sizes, (CHAT, CODE)):
        replays = [name for name in args.replays if REPLAYS[name].source == kind]
        systems = [name for name in args.systems if size != "whole" or name not in LIBRARIES]
        bench = Bench(workspace, SIZES[size][kind])
        for system, nodes, replay in product(systems, args.nodes, replays):
            place = {"size": "any" if system in TEXTLESS else size, "system": system}
            place |= {"replay": replay, "nodes": nodes, "rows": args.rows}
            cells.append(notes.take(place, partial(bench.measure, **place)) | {"size": size})
        bench.close()
    return cells


def judge(cells: Iterable[Cell]) -> list[Cell]:
    """Return the reliability of every system by size and nodes, pooled over all replays."""
    groups: dict[tuple[str, str, int], list[Any]] = {}
    for cell in cells:
        if "sums" in cell:
            groups.setdefault((cell["size"], cell["system"], cell["nodes"]), []).append(cell["sums"])
    return [
        {"size": size, "system": system, "nodes": nodes, "replay": ALL}
        | {"reliability": Reliability(np.sum(sums, axis=0)).summary()}
        for (size, system, nodes), sums in groups.items()
    ]


def figures_of(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return all figures as nested mappings."""
    held, places = ("bytes_a_token", "mapped"), ("size", "replay", "system", "nodes")
    return {
        "accepted_length": nested(cells, places, lambda cell: cell["accepted_length"]),
        "memory": nested(cells, ("size", "system"), lambda cell: {key: cell[key] for key in held}),
        "calibration": nested(
            judge(cells), ("size", "system", "nodes", "replay"), lambda cell: cell["reliability"]
        ),
    }


def nested(cells: Iterable[Cell], keys: Sequence[str], value: Callable[[Cell], Any]) -> dict[str, Any]:
    """Return values of cells in nested mappings by the values of some keys."""
    found: dict[str, Any] = {}
    for cell in cells:
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(str(cell[key]), {})
        inner[str(cell[keys[-1]])] = value(cell)
    return found


def show(figures: dict[str, Any], nodes: Sequence[int]) -> None:
    """Print accepted lengths by nodes, their means next to memory use, and calibration errors."""
    for size, replays in figures["accepted_length"].items():
        rows: list[list[object]] = [
            [f"{replay}: {system}", *by_nodes.values()]
            for replay, systems in replays.items()
            for system, by_nodes in systems.items()
        ]
        show_table(f"accepted length by nodes, {size} texts", ["drafts", *map(str, nodes)], rows)
        held = figures["memory"][size]
        rows = [
            [
                system,
                *by_nodes.values(),
                held[system]["bytes_a_token"],
                "files" if held[system]["mapped"] else "memory",
            ]
            for system, by_nodes in means_of(replays).items()
        ]
        columns = ["drafts", *map(str, nodes), "bytes a token", "in"]
        show_table(f"mean of the replays, {size} texts", columns, rows)
    rows = [
        [f"{size}: {system}", count]
        + [found[ALL][question][key] for question in ("path", "given parent") for key in ("ece", "promised")]
        for size, systems in figures["calibration"].items()
        for system, by_nodes in systems.items()
        for count, found in by_nodes.items()
    ]
    columns = ["drafts", "nodes", "path: ECE", "promised", "given parent: ECE", "promised"]
    show_table("expected calibration error of drafted nodes; promised by accepted nodes", columns, rows)


def draw(figures: dict[str, Any], folder: Path) -> None:
    """Draw the pictures of README and docs from the first measured texts."""
    size = next(iter(figures["accepted_length"]))
    draw_lengths(folder / "accepted.svg", figures["accepted_length"][size])
    if size in figures["calibration"]:
        draw_reliability(folder / "reliability.svg", figures["calibration"][size])
    progress(f"pictures in {folder}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--systems", help=f"some of {', '.join(SYSTEMS)} (default: all)")
    parser.add_argument("--replays", help=f"parts of the names of {', '.join(REPLAYS)} (default: all)")
    parser.add_argument("--sizes", help="some of sample, whole (default: both)")
    parser.add_argument("--nodes", help=f"default: {','.join(map(str, NODES))}")
    parser.add_argument(
        "--rows", type=int, help="outputs of each replay (default: all that are quoted, of the others 100)"
    )
    args = parser.parse_args(arguments)
    args.whole = not (args.quick or args.systems or args.replays or args.sizes or args.nodes)
    args.systems = chosen(parser, args.systems, SYSTEMS)
    for name in absent():
        if name in args.systems:
            args.systems.remove(name)
            args.whole = False
            progress(f"skipping {name}, which is not installed: see benchmarks/quality/libraries.py")
    wanted = args.replays.split(",") if args.replays else [""]
    args.replays = [name for name in REPLAYS if any(part in name for part in wanted)]
    args.sizes = ["tiny"] if args.quick else chosen(parser, args.sizes, ("sample", "whole"))
    nodes = QUICK_NODES if args.quick else NODES
    args.nodes = [int(each) for each in args.nodes.split(",")] if args.nodes else list(nodes)
    args.rows = args.rows or (QUICK_ROWS if args.quick else None)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure missing figures, print tables, draw, and finish with the JSON document."""
    args = parse_arguments(arguments)
    with open_workspace(args) as workspace:
        figures = figures_of(run(workspace, args))
    show(figures, args.nodes)
    draw(figures, DOCS if args.whole else args.out)
    about = describe_machine(["arctic-inference", "sglang"]) | {"rows": args.rows}
    finish(args.out, "quality", about | figures)


if __name__ == "__main__":
    main()
