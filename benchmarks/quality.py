"""Every system on every replay, over the same texts: `python -m benchmarks.quality`.

Accepted length M (tokens per forward pass), and for drafts with probabilities the expected calibration error, see
benchmarks/reliability.py. Systems are in benchmarks/systems.py, recorded outputs in benchmarks/replays.py.

A cell is one system on one replay with drafts of so many nodes, from the texts of one size: `sample`, 4.5 M tokens that
every system can hold, or `whole`, all of ShareGPT or of the code packages. Cells are kept in the work folder and taken
from there while code and texts are the same, so a run that was interrupted goes on where it was.

Tables first; the last line of stdout is one JSON document, also written to OUT/quality.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.quality --work ~/bench --systems 'REST,stored text' --nodes 16
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.common import CHAT, CODE, Source, Workspace, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.reliability import Reliability, steps_of
from benchmarks.replays import REPLAYS, Replay
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.systems import OURS, SYSTEMS, System, Texts
from draftstore.decoding.loop import Tally
from draftstore.decoding.replay import Recording
from draftstore.storage.files import write_json

NODES = (4, 8, 16, 32, 64)
QUICK_NODES = (8, 64)
ROWS, QUICK_ROWS = 100, 3
SAMPLE = 4_500_000
SIZES: dict[str, dict[Source, Source]] = {
    "sample": {
        CHAT: Source("chat_sharegpt_sixth", CHAT.files, tokens=SAMPLE, every=6),
        CODE: Source("code_packages_sixth", CODE.files, tokens=SAMPLE, every=6),
    },
    "whole": {CHAT: CHAT, CODE: CODE},
    "tiny": {
        CHAT: Source("chat_sharegpt_500k", CHAT.files, tokens=500_000),
        CODE: Source("chat_sharegpt_500k", CHAT.files, tokens=500_000),
    },
}
"""Which texts stand for all texts of their kind."""

Cell = dict[str, Any]
"""Figures of one system on one replay, with its place: size, system, replay, nodes."""


def measure(system: System, recordings: Sequence[Recording], nodes: int, *, promises: bool) -> Cell:
    """Replay outputs with drafts of so many nodes."""
    tally, reliability = Tally(), Reliability()
    for recording in recordings:
        for step, coming in steps_of(system.drafter, recording, nodes):
            tally.add(step)
            if promises:
                reliability.add(step.tree, coming)
    figures = {
        "accepted_length": round(tally.accepted_length, 4),
        "nodes_mean": round(tally.drafted / max(tally.passes, 1), 2),
        "passes": tally.passes,
        "tokens": tally.tokens,
    }
    return figures | ({"sums": reliability.sums.tolist()} if promises else {})


class Notes:
    """Cells in the work folder; each stands for the code and the texts that it was measured with."""

    def __init__(self, folder: Path) -> None:
        """Keep notes in a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def take(self, place: dict[str, Any], figures: Callable[[], dict[str, Any]]) -> Cell:
        """Return the cell of a place: an earlier run's, or what `figures` returns."""
        identity = json.dumps([place, code_digest()], sort_keys=True)
        path = self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
        if not path.exists():
            progress(", ".join(str(value) for value in place.values()))
            write_json(path, place | figures())
        cell: Cell = json.loads(path.read_text(encoding="utf-8"))
        return cell


@cache
def code_digest() -> str:
    """Return a digest of draftstore and of the systems."""
    folder = Path(__file__).parent
    files = [*(folder.parent / "draftstore").rglob("*.py"), folder / "systems.py"]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def run_cells(workspace: Workspace, args: argparse.Namespace) -> list[Cell]:
    """Measure all cells: texts, nodes and systems in turn, so that one system at a time holds memory."""
    notes, cells = Notes(workspace.work / "quality"), list[Cell]()
    rows = args.rows or None
    for size in args.sizes:
        for kind in (CHAT, CODE):
            replays = {name: REPLAYS[name] for name in args.replays if REPLAYS[name].source == kind}
            if not replays:
                continue
            texts = Texts(workspace, SIZES[size][kind])
            for nodes in args.nodes:
                for name in args.systems:
                    with_texts = Opened(texts, name, nodes)
                    cells += [
                        notes.take(
                            {"size": size, "system": name, "replay": replay, "nodes": nodes, "rows": rows},
                            partial(with_texts.measure, chosen, rows),
                        )
                        for replay, chosen in replays.items()
                    ]
                    with_texts.close()
    return cells


class Opened:
    """A system that is made when the first cell is not known yet."""

    def __init__(self, texts: Texts, name: str, nodes: int) -> None:
        self._texts, self._name, self._nodes = texts, name, nodes
        self._system: System | None = None

    def measure(self, replay: Replay, rows: int | None) -> Cell:
        """Measure the system on a replay; it knows nothing of the ones before."""
        if self._system is None:
            self._system = SYSTEMS[self._name](self._texts, self._nodes)
        self._system.forget()
        recordings = replay.read(self._texts.workspace, rows)
        return measure(self._system, recordings, self._nodes, promises=self._name in OURS)

    def close(self) -> None:
        """Give back what the system holds."""
        if self._system is not None:
            self._system.close()
            self._system = None


def reliability_of(cells: Iterable[Cell]) -> dict[str, Any]:
    """Return the reliability over the drafts of several cells."""
    total = Reliability()
    for cell in cells:
        total.sums += np.array(cell["sums"])
    return total.summary()


def calibration(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the reliability of every system over all replays, by size and nodes, and print it with each replay's."""
    found, table = [], []
    promising = [cell for cell in cells if "sums" in cell]
    for size, system, nodes in dict.fromkeys((c["size"], c["system"], c["nodes"]) for c in promising):
        own = [c for c in promising if (c["size"], c["system"], c["nodes"]) == (size, system, nodes)]
        for replay, of_replay in [("all", own), *((cell["replay"], [cell]) for cell in own)]:
            entry = {"size": size, "system": system, "nodes": nodes, "replay": replay}
            summary = reliability_of(of_replay)
            found.append(entry | summary)
            errors = [summary[question][key] for question in summary for key in ("ece", "promised")]
            table.append([f"{size}: {system}", nodes, replay, *errors])
    show_table(
        "expected calibration error of drafted nodes, and what they promised by what was accepted",
        ["drafts", "nodes", "replay", "path: ECE", "promised", "given parent: ECE", "promised"],
        table,
    )
    return found


def show_lengths(cells: Sequence[Cell]) -> None:
    """Print the accepted lengths: a table for each size, replays by systems and nodes."""
    for size in dict.fromkeys(cell["size"] for cell in cells):
        own = [cell for cell in cells if cell["size"] == size]
        nodes = list(dict.fromkeys(cell["nodes"] for cell in own))
        table = []
        for replay in dict.fromkeys(cell["replay"] for cell in own):
            for system in dict.fromkeys(cell["system"] for cell in own):
                row = [c["accepted_length"] for c in own if (c["replay"], c["system"]) == (replay, system)]
                table.append([f"{replay}: {system}", *row])
        for system in dict.fromkeys(cell["system"] for cell in own):
            of_system = [cell for cell in own if cell["system"] == system]
            means = [mean(c["accepted_length"] for c in of_system if c["nodes"] == n) for n in nodes]
            table.append([f"mean of replays: {system}", *means])
        show_table(f"accepted length by nodes, {size} texts", ["replay: drafts", *map(str, nodes)], table)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    add_arguments(parser, code=True)
    parser.add_argument("--systems", help=f"some of {', '.join(SYSTEMS)} (default: all)")
    parser.add_argument("--replays", help=f"parts of the names of {', '.join(REPLAYS)} (default: all)")
    parser.add_argument("--sizes", help="some of sample, whole (default: both)")
    parser.add_argument("--nodes", help=f"(default: {','.join(map(str, NODES))})")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="outputs of each replay, 0 for all (default: %(default)s)"
    )
    args = parser.parse_args(arguments)
    args.systems = _chosen(parser, args.systems, SYSTEMS)
    wanted = args.replays.split(",") if args.replays else [""]
    args.replays = [name for name in REPLAYS if any(part in name for part in wanted)]
    args.sizes = ["tiny"] if args.quick else _chosen(parser, args.sizes, ("sample", "whole"))
    nodes = QUICK_NODES if args.quick else NODES
    args.nodes = [int(each) for each in args.nodes.split(",")] if args.nodes else list(nodes)
    args.rows = QUICK_ROWS if args.quick else args.rows
    return args


def _chosen(parser: argparse.ArgumentParser, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a list, all if there is none; end the program at an unknown one."""
    names = [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not known yet, print tables, and finish with the JSON document."""
    args = parse_arguments(arguments)
    with open_workspace(args) as workspace:
        cells = run_cells(workspace, args)
    show_lengths(cells)
    document = {"rows": args.rows, "calibration": calibration(cells), "cells": cells}
    finish(args.out, "quality", describe_machine() | document)


if __name__ == "__main__":
    main()
