"""Accepted length against bytes, REST and CREST: `python -m benchmarks.stores.crest_curve`.

REST with growing shares of the documents, its bytes counted as its authors store it, and CREST stores of several sizes,
ours and as published, with the bytes of the whole LMDB file. Figures of stores are cached in the work folder while code
and texts are unchanged.

A table first, and a picture of each set in OUT; the last line of stdout is one JSON document, also written to
OUT/crest_curve.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.stores.crest_curve --work ~/bench --sets chat
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.ticker import NullLocator

from benchmarks.common import (
    AUTHORS_TOKEN_BYTES,
    CHAT,
    CODE,
    PART_OF_REST,
    STRATEGY_NAMES,
    TINY,
    Notes,
    Source,
    Workspace,
    accepted_length,
    add_arguments,
    chosen,
    open_workspace,
)
from benchmarks.quality.replays import REPLAYS
from benchmarks.report import describe_machine, finish, new_axes, show_table
from benchmarks.stores.published import build_published
from draftstore.decoding.replay import Recording
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.store import RestStore
from draftstore.trees.frontier import BUDGET

SHARES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
PARTS = (100.0, PART_OF_REST)
"""REST's bytes divided by these are additional sizes of CREST stores."""
MEGABYTES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
CREST, PUBLISHED = "CREST", "CREST, as published"
COLORS = dict(
    zip(
        [*(f"REST, {name}" for name in STRATEGY_NAMES), CREST, PUBLISHED],
        ("#b3541e", "#c8862a", "#1f5f8b", "#8a5a9e"),
        strict=True,
    )
)
QUICK_ROWS, QUICK_MEGABYTES, QUICK_SHARES = 8, (0.5,), (0.1, 1.0)
SETS = {
    "chat": (CHAT, "AlpacaEval: Vicuna-7B-v1.5"),
    "code": (CODE, "HumanEval: CodeLlama-7b-Instruct"),
}

Line = dict[str, Any]
"""The description of a store and its figures."""


def measure_rest(store: RestStore, strategy: str, recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return bytes and accepted length of a REST store."""
    size = AUTHORS_TOKEN_BYTES * store.manifest.counts["tokens"]
    return {"bytes": size} | accepted_length(store.drafter(strategy), recordings, BUDGET)


def measure_crest(
    rest: RestStore, kind: str, max_bytes: int, recordings: Sequence[Recording]
) -> dict[str, Any]:
    """Return bytes and accepted length of a CREST store, which is then removed."""
    with TemporaryDirectory(prefix=".curve-", dir=rest.path.parent) as folder:
        path = Path(folder) / "store"
        if kind == PUBLISHED:
            drafter, entries, size = build_published(rest, path, ngrams=max_bytes, max_bytes=max_bytes)
        else:
            manifest = build_crest(CrestOptions(name="curve", max_bytes=max_bytes), rest.path, path).manifest
            drafter = CrestStore.open(path).drafter()
            size, entries = manifest.parameters["lmdb_bytes"], manifest.counts["entries"]
        return {"bytes": size, "entries": entries} | accepted_length(drafter, recordings, BUDGET)


def run_set(workspace: Workspace, notes: Notes, name: str, args: argparse.Namespace) -> Iterator[Line]:
    """Measure all stores of one set."""
    source, replay = (TINY if args.quick else SETS[name][0]), SETS[name][1]
    recordings = REPLAYS[replay].read(workspace, args.rows)
    rest = workspace.store(source)
    tokens = rest.manifest.counts["tokens"]
    common = {"set": name, "source": source.name, "rows": args.rows}
    for share in QUICK_SHARES if args.quick else SHARES:
        part = Source(f"{source.name}_{share:g}", source.files, tokens=int(share * tokens))
        store = rest if share == 1.0 else workspace.store(part)
        for strategy in STRATEGY_NAMES:
            place = common | {"store": f"REST, {strategy}", "share": share}
            yield notes.take(place, partial(measure_rest, store, strategy, recordings))
    sizes = {int(AUTHORS_TOKEN_BYTES * tokens / part) for part in PARTS}
    sizes |= {int(size * 1e6) for size in (QUICK_MEGABYTES if args.quick else MEGABYTES)}
    for kind, size in product((CREST, PUBLISHED), sorted(sizes)):
        place = common | {"store": kind, "max_bytes": size}
        yield notes.take(place, partial(measure_crest, rest, kind, size, recordings))


def _whole(lines: Sequence[Line]) -> Line:
    """Return the baseline of the comparison: REST of all texts with its published rule."""
    return next(line for line in lines if line["store"] == "REST, longest" and line["share"] == 1.0)


def show(name: str, lines: Sequence[Line]) -> None:
    """Print the stores of a set."""
    whole = _whole(lines)
    rows = [
        [
            line["store"] + (f", {line['share']:.0%} of the text" if "share" in line else ""),
            line["bytes"] / 1e6,
            whole["bytes"] / line["bytes"],
            line.get("entries", ""),
            line["accepted_length"],
            f"{line['accepted_length'] / whole['accepted_length'] - 1:+.1%}",
        ]
        for line in lines
    ]
    columns = ["store", "MB", "REST / bytes", "entries", "M", "to REST longest"]
    show_table(f"{name}: {SETS[name][1]}, {BUDGET} nodes", columns, rows)


def draw(path: Path, name: str, lines: Sequence[Line]) -> None:
    """Draw M over bytes."""
    whole = _whole(lines)
    figure, axes = new_axes(f"REST and CREST, {SETS[name][1]}", "bytes of the store", "accepted length M")
    for store, color in COLORS.items():
        points = sorted((line["bytes"], line["accepted_length"]) for line in lines if line["store"] == store)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, color=color, label=store)
    axes.axhline(whole["accepted_length"], color="#999999", linewidth=0.9, linestyle=":")
    for part in PARTS:
        axes.axvline(whole["bytes"] / part, color="#999999", linewidth=0.9, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda size, _: f"{size / 1e6:g} MB")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every set and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores.crest_curve", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--sets", help=f"some of {', '.join(SETS)} (default: all)")
    parser.add_argument("--rows", type=int, help="outputs of each set (default: all)")
    args = parser.parse_args(arguments)
    sets = ["chat"] if args.quick else chosen(parser, args.sets, SETS)
    args.rows = args.rows or (QUICK_ROWS if args.quick else None)
    found = {}
    with open_workspace(args) as workspace:
        notes = Notes(workspace.work / "crest_curve")
        for name in sets:
            found[name] = list(run_set(workspace, notes, name, args))
            show(name, found[name])
            draw(workspace.out / f"crest_curve_{name}.png", name, found[name])
    about = describe_machine(["lmdb"]) | {"quick": args.quick, "budget": BUDGET}
    finish(args.out, "crest_curve", about | {"sets": found})


if __name__ == "__main__":
    main()
