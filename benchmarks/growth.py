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
from benchmarks.growth_law import fit_laws
from benchmarks.growth_picture import PICTURE, draw_growth
from benchmarks.growth_texts import SHARES, Sample, texts_of
from benchmarks.growthprobe import watched
from benchmarks.measure import progress, run_fresh
from benchmarks.replays import REPLAYS, SPEC_BENCH, Replay
from benchmarks.report import describe_machine, finish, show_table
from draftstore.storage.files import write_json
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import MAX_MATCH

NODES = (16, 64)
CREST_MEGABYTES = (10, 50)
CONTEXTS = 3200
ROWS = 100
KINDS = ("chat", "code", "all")
ALPACA, HUMANEVAL = "AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct"
TESTS: dict[str, dict[str, Replay]] = {
    "chat": {ALPACA: REPLAYS[ALPACA], "Spec-Bench: Vicuna-7B-v1.3": Replay(CHAT, SPEC_BENCH)},
    "code": {HUMANEVAL: REPLAYS[HUMANEVAL]},
}
TESTS["all"] = TESTS["chat"] | TESTS["code"]
"""What stores of a kind of text are replayed on."""
QUICK_SHARES, QUICK_ROWS = (0.0003, 0.001, 0.003), 4


class Notes(NamedTuple):
    """Figures in the work folder, by name."""

    folder: Path

    def take(self, name: str, figures: Callable[[], Any]) -> Any:
        """Return what an earlier run has noted, or what `figures` returns."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            progress(name)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, figures())
        return json.loads(path.read_text(encoding="utf-8"))


class Growth:
    """All measurements, each made once."""

    def __init__(self, workspace: Workspace, rows: int | None) -> None:
        """Measure with all outputs of the replays, or with few of them."""
        self._space, self._rows = workspace, rows
        self._notes = Notes(workspace.work / "growth")

    def measure(self, sample: Sample) -> dict[str, Any]:
        """Return the figures of a sample: the build of its REST store, drafts, and accepted lengths."""
        rest = self._path(sample)
        built = self._notes.take(f"{sample.name}-rest", partial(self._build, sample, rest))
        figures = {"name": sample.name, "kind": sample.kind, "nested": sample.nested, "tokens": built["tokens"]}
        figures |= {"rest": built, "lookup": self._notes.take(f"{sample.name}-lookup", partial(self._look_up, rest))}
        return figures | {"accepted_length": {"REST": self._lengths(sample, rest)}}

    def distil(self, sample: Sample, figures: dict[str, Any]) -> None:
        """Add the figures of the CREST stores of a sample."""
        for size in CREST_MEGABYTES:
            rest = self._path(sample)
            out = rest.with_name(f"{rest.name}_{size}MB")
            name = f"crest_{size}"
            figures[name] = self._notes.take(f"{sample.name}-{name}", partial(self._distil, rest, out, size))
            figures["accepted_length"][f"CREST, {size} MB"] = self._lengths(sample, out)

    def _path(self, sample: Sample) -> Path:
        return self._space.work / "stores" / f"growth_{sample.name}"

    def _lengths(self, sample: Sample, store: Path) -> dict[str, dict[str, float]]:
        """Return the accepted lengths of a store by replay and nodes."""
        name = f"{store.name}-M-{self._rows}"
        lengths: dict[str, dict[str, float]] = self._notes.take(name, partial(self._replay, store, sample))
        return lengths

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
            "benchmarks.growthprobe", {"what": "crest", "rest": str(rest), "out": str(out), "megabytes": megabytes}
        )

    def _look_up(self, rest: Path) -> dict[str, Any]:
        """Open a store and time drafts, on one core, with its pages in memory."""
        path = self._space.work / "growth-contexts.npy"
        np.save(path, draw_contexts(TESTS["chat"][ALPACA].read(self._space), CONTEXTS, MAX_MATCH))
        asked = {"what": "queries", "store": str(rest), "contexts": str(path)}
        return run_fresh("benchmarks.queryprobe", asked | {"strategies": STRATEGY_NAMES})

    def _replay(self, store: Path, sample: Sample) -> dict[str, dict[str, float]]:
        """Return the accepted length by replay and nodes."""
        opened = open_store(store)
        drafter = opened.drafter(opened.default_strategy)
        found = {
            name: {
                str(nodes): accepted_length(drafter, test.read(self._space, self._rows), nodes)["accepted_length"]
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


def fit(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit the laws to the nested samples, for each kind of text, replay, store and number of nodes."""
    laws = []
    for kind in dict.fromkeys(each["kind"] for each in measured if each["nested"]):
        points = [each for each in measured if each["kind"] == kind and each["nested"]]
        for store, replay, nodes in _lines(points[0]["accepted_length"]):
            lengths = [each["accepted_length"][store][replay][nodes] for each in points]
            place = {"kind": kind, "store": store, "replay": replay, "nodes": int(nodes)}
            laws.append(place | fit_laws([each["tokens"] for each in points], lengths))
    return laws


def _lines(lengths: dict[str, dict[str, dict[str, float]]]) -> list[tuple[str, str, str]]:
    return [(store, replay, n) for store in lengths for replay in lengths[store] for n in lengths[store][replay]]


def show(measured: Sequence[dict[str, Any]], laws: Sequence[dict[str, Any]]) -> None:
    """Print what was measured, and the laws."""
    rows = []
    for each in measured:
        build, lookup, crest = each["rest"], each["lookup"], each[f"crest_{CREST_MEGABYTES[-1]}"]
        rows.append([
            each["name"], each["tokens"], build["segments"], build["build_seconds"] / 3600,
            build["peak_anonymous"] / 1e9, build["peak_resident"] / 1e9, build["bytes_per_token"], lookup["open_ms"],
            *(lookup["backoff"]["query_us"][key] for key in ("p50", "p99")), crest["build_seconds"] / 3600,
            crest["peak_anonymous"] / 1e9, crest["peak_resident"] / 1e9,
        ])  # fmt: skip
    columns = ["store", "tokens", "segments", "hours", "own GB", "and mapped", "B/token", "open ms", "p50 µs", "p99 µs"]
    columns += ["CREST: hours", "own GB", "and mapped"]
    show_table("what builds cost, on all cores of a shared machine; memory: peak over all processes", columns, rows)
    for kind in dict.fromkeys(each["kind"] for each in measured):
        own = [each for each in measured if each["kind"] == kind]
        rows = [
            [f"{replay}: {store}, {nodes} nodes", *(each["accepted_length"][store][replay][nodes] for each in own)]
            for store, replay, nodes in _lines(own[0]["accepted_length"])
        ]
        show_table(f"accepted length by tokens, {kind}", ["", *(f"{each['tokens']:,}" for each in own)], rows)
    columns = ["", "M a power of ten", "rms error", "power law: rms", "largest from the others", "was", "at 10^10", "from", "to"]
    rows = [
        [
            f"{law['replay']}: {law['store']}, {law['nodes']}", law["log"]["slope"], law["log"]["rms"], law["power"]["rms"],
            law["held_out"]["log"], law["held_out"]["measured"], law["log"]["at"], *law["range"],
        ]
        for law in laws
    ]  # fmt: skip
    show_table("M = a + b log10(tokens), and M = 1 + c tokens^k", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not known yet, fit the laws, print tables, and finish with the JSON document and the picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    add_arguments(parser, code=True)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of %(default)s")
    parser.add_argument("--rows", type=int, default=ROWS, help="outputs of each replay (default: %(default)s)")
    args = parser.parse_args(arguments)
    kinds = ["chat"] if args.quick else args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    with open_workspace(args) as workspace:
        growth = Growth(workspace, QUICK_ROWS if args.quick else args.rows)
        shares = QUICK_SHARES if args.quick else SHARES
        texts = [sample for kind in kinds for sample in texts_of(workspace, kind, shares)]
        measured = [growth.measure(sample) for sample in texts]
        for sample, figures in zip(texts, measured, strict=True):
            growth.distil(sample, figures)
    laws = fit(measured)
    show(measured, laws)
    about = describe_machine(["lmdb"]) | {"quick": args.quick}
    finish(args.out, "growth", about | {"measured": measured, "laws": laws})
    if not args.quick:
        draw_growth(PICTURE, measured, laws)


if __name__ == "__main__":
    main()
