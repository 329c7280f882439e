"""Every system on every replay, over the same texts: `python -m benchmarks.quality`.

Accepted length M (tokens per forward pass), and for drafts with probabilities the expected calibration error, see
benchmarks/reliability.py. Then what a draft costs the host, all systems in turn at the same places (compare within one
run). Systems are in benchmarks/systems.py, recorded outputs in benchmarks/replays.py. arctic-inference and SGLang take
part where they are installed: benchmarks/peers.py and benchmarks/ngram.py say how. Where nothing is left out, the two
pictures are drawn: docs/accepted.svg and docs/reliability.svg.

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
from functools import cache, cached_property, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import CHAT, CODE, Source, Workspace, add_arguments, open_workspace
from benchmarks.host_times import time_in_turn
from benchmarks.measure import progress
from benchmarks.picture import LENGTHS, RELIABILITY, draw_lengths, draw_reliability
from benchmarks.quality_report import Cell, figures_of, judge, show_calibration, show_lengths
from benchmarks.reliability import Reliability, steps_of
from benchmarks.replays import REPLAYS
from benchmarks.report import describe_machine, finish
from benchmarks.systems import IN_MEMORY, OURS, SYSTEMS, TEXTLESS, System, Texts
from draftstore.decoding.loop import Tally
from draftstore.decoding.replay import Recording
from draftstore.storage.files import write_json

NODES = (4, 8, 16, 32, 64)
QUICK_NODES = (8, 64)
QUICK_ROWS = 3
DRAFTS, QUICK_DRAFTS = 1000, 40
TIMED_ROWS = 20
TIMED = ("AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct")
"""Replays at which drafts are timed."""
MODULES = ("asked", "host_times", "ngram", "peers", "reliability", "replays", "systems")
"""What cells depend on, beside draftstore."""
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
    files = [*(folder.parent / "draftstore").rglob("*.py"), *(folder / f"{name}.py" for name in MODULES)]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def run(workspace: Workspace, args: argparse.Namespace) -> tuple[list[Cell], list[Cell]]:
    """Measure all cells, and the times of all systems in turn; texts of one kind are open at a time."""
    notes, cells, times = Notes(workspace.work / "quality"), list[Cell](), list[Cell]()
    for size, kind in product(args.sizes, (CHAT, CODE)):
        replays = [name for name in args.replays if REPLAYS[name].source == kind]
        systems = [name for name in args.systems if size != "whole" or name not in IN_MEMORY]
        opened = Opened(workspace, SIZES[size][kind])
        for nodes in args.nodes if replays else ():
            for name, replay in product(systems, replays):
                place = {"size": "any" if name in TEXTLESS else size, "system": name}
                place |= {"replay": replay, "nodes": nodes, "rows": args.rows}
                cells.append(notes.take(place, partial(opened.measure, **place)) | {"size": size})
            if timed := [name for name in TIMED if name in replays]:
                place = {"size": size, "systems": systems, "replay": timed[0], "nodes": nodes}
                place["drafts"] = QUICK_DRAFTS if args.quick else DRAFTS
                found = notes.take(place, partial(opened.time, **place))
                times += [place | {"system": name} | taken for name, taken in found["times"].items()]
        opened.close()
    return cells, times


class Opened:
    """The texts of one kind and the systems made of them, each when it is asked for."""

    def __init__(self, workspace: Workspace, source: Source) -> None:
        self._workspace, self._source = workspace, source
        self._systems: dict[str, System] = {}
        self._read: dict[tuple[str, int | None], list[Recording]] = {}

    @cached_property
    def texts(self) -> Texts:
        """The texts."""
        return Texts(self._workspace, self._source)

    def recordings(self, replay: str, rows: int | None) -> list[Recording]:
        """Return the recordings of a replay, read once."""
        if (replay, rows) not in self._read:
            self._read[replay, rows] = REPLAYS[replay].read(self._workspace, rows)
        return self._read[replay, rows]

    def system(self, name: str, nodes: int) -> System:
        """Return a system that can be asked for so many nodes, and that knows of no replay.

        Raises:
            ImportError: it is not installed.
        """
        if name in self._systems and self._systems[name].nodes not in (None, nodes):
            self.close(name)
        if name not in self._systems:
            self._systems[name] = SYSTEMS[name](self.texts, nodes)
        self._systems[name].forget()
        return self._systems[name]

    def measure(self, system: str, replay: str, nodes: int, rows: int | None, **_place: object) -> Cell:
        """Measure a system on a replay."""
        recordings = self.recordings(replay, rows)
        made = self.system(system, nodes)
        share = made.memory / self.texts.tokens if made.memory else 0.0
        held = {"bytes_a_token": round(share, 2), "mapped": made.mapped}
        return measure(made, recordings, nodes, promises=system in OURS) | held

    def time(self, systems: Sequence[str], replay: str, nodes: int, drafts: int, **_place: object) -> Cell:
        """Time systems in turn on a replay."""
        made = {name: self.system(name, nodes) for name in systems}
        recordings = self.recordings(replay, TIMED_ROWS)
        return {"times": time_in_turn(made, recordings, nodes, drafts)}

    def close(self, *names: str) -> None:
        """Give back what systems hold, all of them if none is named."""
        for name in names or list(self._systems):
            if system := self._systems.pop(name, None):
                system.close()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    add_arguments(parser, code=True)
    parser.add_argument("--systems", help=f"some of {', '.join(SYSTEMS)} (default: all)")
    parser.add_argument("--replays", help=f"parts of the names of {', '.join(REPLAYS)} (default: all)")
    parser.add_argument("--sizes", help="some of sample, whole (default: both)")
    parser.add_argument("--nodes", help=f"default: {','.join(map(str, NODES))}")
    parser.add_argument("--draw", action="store_true", help="draw what OUT holds again; measure nothing")
    parser.add_argument(
        "--rows", type=int, help="outputs of each replay (default: all that are quoted, of the others 100)"
    )
    args = parser.parse_args(arguments)
    args.whole = not (args.quick or args.systems or args.replays or args.sizes or args.nodes)
    args.systems = [
        name
        for name in _chosen(parser, args.systems, SYSTEMS)
        if name not in IN_MEMORY or find_spec(IN_MEMORY[name])
    ]
    wanted = args.replays.split(",") if args.replays else [""]
    args.replays = [name for name in REPLAYS if any(part in name for part in wanted)]
    args.sizes = ["tiny"] if args.quick else _chosen(parser, args.sizes, ("sample", "whole"))
    nodes = QUICK_NODES if args.quick else NODES
    args.nodes = [int(each) for each in args.nodes.split(",")] if args.nodes else list(nodes)
    args.rows = args.rows or (QUICK_ROWS if args.quick else None)
    return args


def _chosen(parser: argparse.ArgumentParser, text: str | None, known: Iterable[str]) -> list[str]:
    """Return the names in a list, all if there is none; end the program at an unknown one."""
    names = [name.strip() for name in text.split(",")] if text else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not known yet, print tables, and finish with the JSON document; draw if nothing was left out."""
    args = parse_arguments(arguments)
    if not args.draw:
        with open_workspace(args) as workspace:
            cells, times = run(workspace, args)
        judged = judge(cells)
        show_lengths(cells, times)
        show_calibration(judged)
        about = describe_machine(["arctic-inference", "sglang"]) | {"rows": args.rows}
        finish(args.out, "quality", about | figures_of(cells, times, judged))
    found = json.loads((args.out / "quality.json").read_text(encoding="utf-8"))
    if args.draw or (args.whole and len(args.systems) == len(SYSTEMS)):
        draw_lengths(LENGTHS, found["accepted_length"]["sample"])
        draw_reliability(RELIABILITY, found["calibration"]["sample"])


if __name__ == "__main__":
    main()
