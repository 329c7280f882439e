"""Builds on a Ray cluster of two nodes of one core, and by two processes: `python -m benchmarks.stores.cluster`.

REST stores of ShareGPT in eight files, with segments of four million tokens, in turn: seconds, and seconds of cores, in
which the cluster's own processes count, but not their start. The stores must have the same bytes.

A table first; the last line of stdout is one JSON document, also written to OUT/cluster.json.

Examples:
    make .venv-ray/.done
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.stores.cluster --work ~/bench
"""

import argparse
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import psutil

from benchmarks.common import CHAT, Workspace, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.processes import CHECKOUT, free_port
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.storage.manifest import load_manifest
from draftstore.storage.streams import read_lines, write_lines

BIN = CHECKOUT / ".venv-ray/bin"
FILES, SEGMENT_TOKENS = 8, 4_000_000
WAYS = "two processes", "two nodes"


def main() -> None:
    """Build in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3, help="builds of each (default: 3)")
    args = parser.parse_args()
    head = f"127.0.0.1:{free_port() % 10_000 + 20_000}"  # above the ports of Ray's workers
    with open_workspace(args) as space:
        texts = _texts(space, 64 if args.quick else None)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        with (
            _node("--head", f"--port={head.rpartition(':')[2]}") as first,
            _node(f"--address={head}") as second,
        ):
            for number in range(args.rounds + 1):  # the first compiles and warms up
                progress(f"round {number}")
                stores = {}
                for way in WAYS[:: 1 if number % 2 else -1]:
                    stores[way] = space.work / f"cluster-{WAYS.index(way)}"
                    own = ["--cluster", head] if way == WAYS[1] else []
                    figures = _build(space, texts, stores[way], own, (first, second))
                    found[way] += [figures] * (number > 0)
                digests = [load_manifest(stores[way], "rest").files for way in WAYS]
                if digests[0] != digests[1]:
                    raise SystemExit("the stores differ")
        rows = [
            {"by": way, **{key: round(median(each[key] for each in found[way]), 1) for key in found[way][0]}}
            for way in WAYS
        ]
        show_rows("REST store of ShareGPT", rows)
        finish(space.out, "cluster", {"machine": describe_machine(), "rows": rows})


def _texts(space: Workspace, records: int | None) -> Path:
    """Divide ShareGPT into files."""
    folder = space.work / "cluster-texts"
    folder.mkdir(exist_ok=True)
    [source] = space.inputs(CHAT)
    lines = [line + b"\n" for line in islice(read_lines(source, []), records) if line is not None]
    for number in range(FILES):
        write_lines(folder / f"{number}.jsonl.zst", lines[number::FILES], ".zst")
    return folder


@contextmanager
def _node(*options: str) -> Iterator[psutil.Process]:
    """Run a node of one core."""
    command: list[str | Path] = [
        BIN / "ray",
        "start",
        "--block",
        "--num-cpus=1",
        "--disable-usage-stats",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        sleep(20)
        yield psutil.Process(process.pid)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def _build(
    space: Workspace, texts: Path, out: Path, options: Sequence[str], nodes: Sequence[psutil.Process]
) -> dict[str, float]:
    """Build a store; return seconds, and seconds of cores."""
    command: list[Any] = [
        BIN / "draftstore", "build", "rest", "--corpus", texts, "--glob", "*.jsonl.zst", "--out", out,
        "--name", "texts", "--tokenizer", space.data / "tokenizers" / space.vocabulary,
        "--segment-tokens", SEGMENT_TOKENS, "--workers", 2, "--overwrite", *options,
    ]  # fmt: skip
    before, spent = _spent(nodes), dict[int, float]()
    begin = perf_counter()
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.DEVNULL, env=os.environ | {"SOURCE_DATE_EPOCH": "1"}
    ) as build:
        own = psutil.Process(build.pid)
        while build.poll() is None:
            spent |= _spent([own, *nodes])  # processes of the cluster end with the build
            sleep(0.1)
    seconds = perf_counter() - begin
    if build.returncode:
        raise SystemExit("the build failed: see above")
    return {"seconds": seconds, "core seconds": sum(spent.values()) - sum(before.values())}


def _spent(roots: Sequence[psutil.Process]) -> dict[int, float]:
    """Return the seconds of cores so far of processes and all below them."""
    spent = {}
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            for each in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    spent[each.pid] = sum(each.cpu_times()[:2])
    return spent


if __name__ == "__main__":
    main()
