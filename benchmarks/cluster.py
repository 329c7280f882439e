"""Map stages of a build on a Dask cluster of two processes, against one process on one core and on two.

    python -m benchmarks.cluster --data DATA [--documents 4000] [--rounds 3] [--out FOLDER]

The ways take turns, and of every stage the fastest round counts: on a machine with other work the slower ones measure
that work. Processor seconds, less what the processes of a cluster spend on waiting, hardly depend on it: twice those of
one process, divided by those of two, bound what two processes can gain.
"""

import argparse
import json
import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common import DATA_VARIABLE, RESULTS, TOKENIZER
from benchmarks.measure import ONE_CORE, progress, run_fresh
from benchmarks.report import describe_machine, finish, show_table
from draftstore.storage.streams import read_lines

WAYS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one core": ({"cores": 1, "cluster": None}, ONE_CORE),
    "two cores": ({"cores": 2, "cluster": None}, {}),
    "two Dask processes": ({"cores": 2, "cluster": "local:2"}, ONE_CORE),
}
STAGES = ("tokenize", "sort", "count")
CORPUS = "chat_sharegpt.jsonl.zst"
SEGMENTS = 8


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=os.environ.get(DATA_VARIABLE), help="data folder")
    parser.add_argument("--documents", type=int, default=4000, help=f"conversations of {CORPUS}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Measure all ways in turn; the bytes must be the same."""
    corpus = folder / "corpus.jsonl"
    lines = read_lines(args.data / "corpora" / CORPUS)
    corpus.write_bytes(b"".join(line for line in islice(lines, args.documents) if line))
    request: dict[str, Any] = {
        "inputs": [str(corpus)],
        "tokenizer": str(args.data / "tokenizers" / TOKENIZER),
        "out": str(folder / "out"),
        "segment_tokens": max(corpus.stat().st_size // 4 // SEGMENTS, 1000),
    }
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(args.rounds):
        for way, (how, environment) in WAYS.items():
            progress(f"round {number + 1}: {way}")
            rounds[way].append(run_fresh("benchmarks.clusterprobe", {**request, **how}, environment))
            shutil.rmtree(folder / "out")
    digests = {one["digest"] for made in rounds.values() for one in made}
    if len(digests) != 1:
        raise SystemExit("the ways do not make the same bytes")
    return rounds


def summarize(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the fastest figures of every way and stage, and what two Dask processes gain."""
    best = {
        way: {
            stage: {key: min(one["stages"][stage][key] for one in made) for key in made[0]["stages"][stage]}
            for stage in STAGES
        }
        for way, made in rounds.items()
    }
    dask = best["two Dask processes"]
    for way in ("one core", "two cores"):
        for stage in STAGES:
            dask[stage][f"times {way}"] = round(
                best[way][stage]["map_seconds"] / dask[stage]["map_seconds"], 2
            )
    for stage in STAGES:
        work = min(
            one["stages"][stage]["processor_seconds"] - one["stages"][stage]["idle_seconds"]
            for one in rounds["two Dask processes"]
        )
        dask[stage]["bound"] = round(2 * best["one core"][stage]["processor_seconds"] / work, 2)
    return best


def main() -> None:
    """Measure, show and save."""
    args = parse_arguments()
    about = describe_machine(["distributed", "dask", "tokenizers"])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(args, Path(folder))
    best = summarize(rounds)
    rows = [
        (
            f"{way}: {stage}",
            *(figures.get(key, "") for key in ("map_seconds", "seconds", "processor_seconds")),
        )
        for way, stages in best.items()
        for stage, figures in stages.items()
    ]
    show_table("stages of a build", ["way", "map s", "stage s", "processor s"], rows)
    gains = [
        (
            stage,
            *(
                best["two Dask processes"][stage][key]
                for key in ("times one core", "times two cores", "bound")
            ),
        )
        for stage in STAGES
    ]
    show_table("two Dask processes", ["map stage", "x one core", "x two cores", "x at most"], gains)
    one = rounds["two Dask processes"][0]
    document = {
        **about,
        "load_average": load,
        "load_average_after": os.getloadavg()[0],
        "tokens": one["tokens"],
        "segments": one["segments"],
        "start_seconds": min(made["start_seconds"] for made in rounds["two Dask processes"]),
        "fastest": best,
        "rounds": rounds,
    }
    finish(args.out, "cluster", json.loads(json.dumps(document)))


if __name__ == "__main__":
    main()
