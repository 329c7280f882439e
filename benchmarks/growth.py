"""Accepted length by tokens of text: `python -m benchmarks.growth`.

Nested samples of all chat corpora, and of the Python code of 71 packages, which differ in size alone
(benchmarks/growth_texts.py); beside them the small list of packages, and one store of everything. Of each a REST store,
and CREST stores of 10 and 50 MB distilled from it, replayed with drafts of 16 and 64 nodes. Two laws are fitted to the
samples, and drawn on to 10^10 tokens with their uncertainty (benchmarks/growth_law.py). Also what each build costs:
time, peak of memory over all its processes, bytes; and how long a draft takes.

Stores and figures are kept in the work folder: a run that was interrupted goes on where it was. What was noted stands
until its file under WORK/growth is removed. Tables first; the last line of stdout is one JSON document, also written to
OUT/growth.json. Draws docs/growth.svg, unless --quick.

Example:
    DRAFTSTORE_TEST_DATA=~/data nice python -m benchmarks.growth --work ~/bench
"""

import argparse
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import (
    CHAT,
    STRATEGY_NAMES,
    TOKENIZER,
    Workspace,
    accepted_length,
    add_arguments,
    draw_contexts,
    open_workspace,
)
from benchmarks.growth_picture import PICTURE, draw_growth
from benchmarks.growth_report import fit, show
from benchmarks.growth_texts import SHARES, Sample, texts_of
from benchmarks.growthprobe import watched
from benchmarks.measure import progress, run_fresh
from benchmarks.replays import REPLAYS, SPEC_BENCH, Replay
from benchmarks.report import describe_machine, finish
from draftstore.storage.files import write_json
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import MAX_MATCH

NODES = (16, 64)
CREST_MEGABYTES = (10, 50)
CONTEXTS = 3200
ROWS = 100
COLD = 40
"""Drafts that find nothing in memory."""
CUT, SEGMENTS = "chat_0.3", (1, 2, 4, 8, 16, 32, 64)
"""The sample that is cut into so many segments."""
KINDS = ("chat", "code", "all")
ALPACA, HUMANEVAL = "AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct"
TESTS: dict[str, dict[str, Replay]] = {
    "chat": {
        ALPACA: REPLAYS[ALPACA],
        "Spec-Bench: Vicuna-7B-v1.3": Replay(CHAT, SPEC_BENCH),
        HUMANEVAL: REPLAYS[HUMANEVAL],
    },
    "code": {HUMANEVAL: REPLAYS[HUMANEVAL]},
}
TESTS["all"] = TESTS["chat"]
"""What stores of a kind of text are replayed on."""
QUICK_SHARES, QUICK_ROWS = (0.0003, 0.001, 0.003), 4


class Notes(NamedTuple):
    """Figures in the work folder, by name; if only known ones are wanted, what is not there stays unmeasured."""

    folder: Path
    known: bool

    def take(self, name: str, figures: Callable[[], Any]) -> Any:
        """Return what an earlier run has noted, or what `figures` returns; None if that may not be asked."""
        path = self.folder / f"{name}.json"
        if not path.exists() and not self.known:
            progress(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, figures())
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class Growth:
    """All measurements, each made once."""

    def __init__(self, workspace: Workspace, rows: int, known: bool) -> None:
        """Measure with so many outputs of each replay, or take only what is known."""
        self._space, self._rows = workspace, rows
        self._notes = Notes(workspace.work / "growth", known)

    def measure(self, sample: Sample) -> dict[str, Any] | None:
        """Return the figures of a sample: the build of its REST store, drafts, and accepted lengths."""
        rest = self._path(sample)
        built = self._notes.take(f"{sample.name}-rest", partial(self._build, sample, rest))
        if built is None:
            return None
        figures = {
            "name": sample.name,
            "kind": sample.kind,
            "nested": sample.nested,
            "tokens": built["tokens"],
        }
        figures |= {
            "rest": built,
            "lookup": self._notes.take(f"{sample.name}-lookup", partial(self._look_up, rest)),
            "cold": self._notes.take(f"{sample.name}-cold", partial(self._read_cold, rest)),
            "accepted_length": {},
        }
        self._add_lengths(figures, "REST", sample, rest)
        return figures

    def distil(self, sample: Sample, figures: dict[str, Any]) -> None:
        """Add the figures of the CREST stores of a sample."""
        for size in CREST_MEGABYTES:
            rest = self._path(sample)
            out = rest.with_name(f"{rest.name}_{size}MB")
            name = f"crest_{size}"
            figures[name] = self._notes.take(f"{sample.name}-{name}", partial(self._distil, rest, out, size))
            self._add_lengths(figures, f"CREST, {size} MB", sample, out)

    def segments(self, samples: Sequence[Sample]) -> Any:
        """Return the times of drafts by number of segments, of the sample that is named for it."""
        for sample in samples:
            if sample.name == CUT:
                return self._notes.take(f"{CUT}-segments", partial(self._cut, self._path(sample)))
        return None

    def _add_lengths(self, figures: dict[str, Any], store: str, sample: Sample, path: Path) -> None:
        """Add the accepted lengths of a store by replay and nodes."""
        name = f"{path.name}-M-{self._rows}"
        if lengths := self._notes.take(name, partial(self._replay, path, sample)):
            figures["accepted_length"][store] = lengths

    def _path(self, sample: Sample) -> Path:
        return self._space.work / "stores" / f"growth_{sample.name}"

    def _build(self, sample: Sample, out: Path) -> dict[str, Any]:
        """Build the store of a sample on all cores, from the beginning."""
        shutil.rmtree(out.with_name(f".{out.name}.partial"), ignore_errors=True)
        arguments = {
            "what": "build",
            "inputs": [str(path) for path in sample.files],
            "tokenizer": str(self._space.data / "tokenizers" / TOKENIZER),
            "name": sample.name,
            "out": str(out),
            "workers": max(2, len(os.sched_getaffinity(0))),
        }
        return _watched("benchmarks.buildprobe", arguments)

    def _distil(self, rest: Path, out: Path, megabytes: int) -> dict[str, Any]:
        """Distil a CREST store, from the beginning."""
        shutil.rmtree(out.with_name(f".{out.name}.partial"), ignore_errors=True)
        return _watched(
            "benchmarks.growthprobe",
            {"what": "crest", "rest": str(rest), "out": str(out), "megabytes": megabytes},
        )

    def _look_up(self, rest: Path) -> dict[str, Any]:
        """Open a store and time drafts, on one core, with its pages in memory."""
        asked = {"what": "queries", "store": str(rest), "contexts": self._contexts()}
        return run_fresh("benchmarks.queryprobe", asked | {"strategies": STRATEGY_NAMES})

    def _read_cold(self, rest: Path) -> dict[str, Any]:
        """Draft with nothing of the store in memory."""
        asked = {"what": "cold", "store": str(rest), "contexts": self._contexts(), "queries": COLD}
        return run_fresh("benchmarks.growthprobe", asked)

    def _cut(self, rest: Path) -> dict[str, Any]:
        """Time drafts by number of segments."""
        asked = {"what": "segments", "store": str(rest), "contexts": self._contexts(), "counts": SEGMENTS}
        return run_fresh("benchmarks.growthprobe", asked)

    def _contexts(self) -> str:
        """Return a file of places in recorded outputs, made anew: the same ones every time."""
        path = self._space.work / "growth-contexts.npy"
        np.save(path, draw_contexts(TESTS["chat"][ALPACA].read(self._space), CONTEXTS, MAX_MATCH))
        return str(path)

    def _replay(self, store: Path, sample: Sample) -> dict[str, dict[str, float]]:
        """Return the accepted length by replay and nodes."""
        opened = open_store(store)
        drafter = opened.drafter(opened.default_strategy)
        found = {
            name: {
                str(nodes): accepted_length(drafter, test.read(self._space, self._rows), nodes)[
                    "accepted_length"
                ]
                for nodes in NODES
            }
            for name, test in TESTS[sample.kind].items()
        }
        opened.close()
        return found


def _watched(module: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a program in a fresh process; return its figures, with the peak of memory and how busy the machine was."""
    with watched() as peaks:
        figures = run_fresh(module, arguments)
    return figures | peaks | {"load_average": round(os.getloadavg()[0], 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not known yet, fit the laws, print tables, and finish with the JSON document and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    add_arguments(parser, code=True)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="outputs of each replay (default: %(default)s)"
    )
    parser.add_argument("--known", action="store_true", help="report what WORK holds; measure nothing")
    args = parser.parse_args(arguments)
    kinds = ["chat"] if args.quick else args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    with open_workspace(args) as workspace:
        growth = Growth(workspace, QUICK_ROWS if args.quick else args.rows, args.known)
        shares = QUICK_SHARES if args.quick else SHARES
        texts = [sample for kind in kinds for sample in texts_of(workspace, kind, shares)]
        found = {sample: growth.measure(sample) for sample in texts}
        measured = {sample: figures for sample, figures in found.items() if figures is not None}
        for sample, figures in measured.items():
            growth.distil(sample, figures)
        segments = growth.segments(texts)
    points = list(measured.values())
    laws = fit(points)
    show(points, laws)
    about = describe_machine(["lmdb"]) | {"quick": args.quick, "rows": args.rows, "segments": segments}
    finish(args.out, "growth", about | {"measured": points, "laws": laws})
    if not args.quick:
        draw_growth(PICTURE, points, laws)


if __name__ == "__main__":
    main()
