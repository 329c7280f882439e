"""Nearest entries of one first token, beside faiss and ScaNN: `python -m benchmarks.dresd_search`.

A DReSD store of float16 vectors of real hidden states, enlarged to --entries where it holds fewer: every further copy
of an entry is its vector with noise of --noise times its length, under the same first token, so that group sizes keep
the proportions of real text. The queries are states that the store does not hold, from positions where decoding
would ask, each with the token that came next there.

Every system is asked for the ten nearest entries whose first token is that token; see benchmarks.dresd_peers for how
peers filter. The truth is the exact answer of float32 vectors. For each peer the cheapest setting that reaches the
recall of the float16 search is chosen on --tuning queries, or the one of the highest recall where none does. Then all
are timed on the other queries, one by one on one core, in turn in random order.

The last line of stdout is one JSON document, also written to OUT/dresd_search.json.

Example:
    python -m benchmarks.dresd_search --store stores/dresd --queries queries.npz
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, SEED
from benchmarks.dresd_peers import Entries, K, Ours, Peer, build_peers
from benchmarks.measure import percentiles, progress, time_calls, time_in_turn, undisturbed
from benchmarks.report import describe_machine, finish, show_table
from draftstore.drafting.projection import unit
from draftstore.errors import DraftstoreError
from draftstore.stores.dresd.kernels.quantised import restore
from draftstore.stores.dresd.store import DresdStore

PEERS = ("flat", "ivf", "hnsw", "scann")
LONGEST_SECONDS = 0.2
"""Settings that take longer for a query are not tried: no decoder waits so long."""


class Questions(NamedTuple):
    """Queries and what is true of them.

    Attributes:
        queries: float32 [n, dims], of unit length.
        tokens: int32 [n].
        truth: the nearest entries of each, fewer where the group is small.
    """

    queries: NDArray[np.float32]
    tokens: NDArray[np.int32]
    truth: list[NDArray[np.int64]]


class Chosen(NamedTuple):
    """A system with one setting, and whether it reached the recall that was wanted."""

    label: str
    peer: Peer
    setting: Any
    reached: bool


def read_entries(store: Path, wanted: int, noise: float) -> Entries:
    """Read a store, and enlarge it."""
    opened = DresdStore.open(store)
    if opened.manifest.parameters["dtype"] != "float16":
        raise SystemExit(f"{store} holds int8: name a store of float16, from which both are made here")
    vectors, groups = restore(opened.index.vectors), np.asarray(opened.index.groups)
    rng = np.random.default_rng(SEED)
    rounds = -(-wanted // len(vectors))
    copies = np.concatenate([rng.permutation(len(vectors)) for _ in range(rounds)])[:wanted]
    made = np.arange(len(copies)) >= len(vectors)
    order = np.lexsort((made, copies))  # entries are sorted by first token, so are their numbers
    enlarged = vectors[copies[order]]
    spread = np.float32(noise / vectors.shape[1] ** 0.5)
    places = np.flatnonzero(made[order])
    for part in np.array_split(places, 64):
        enlarged[part] += spread * rng.standard_normal((len(part), vectors.shape[1]), np.float32)
    return Entries(
        unit(enlarged),
        np.searchsorted(copies[order], groups).astype(np.int64),
        opened.tokens.nbytes / len(vectors),
        max(0.0, 1.0 - len(vectors) / wanted),
    )


def read_questions(path: Path, entries: Entries, count: int) -> Questions:
    """Read queries, and find the true neighbours of those whose token has entries."""
    with np.load(path) as file:
        queries, tokens = unit(file["queries"].astype(np.float32)), file["tokens"].astype(np.int32)
    sizes = np.diff(entries.groups)
    asked = np.flatnonzero((sizes[tokens] > 0) & np.isfinite(queries).all(axis=1))
    asked = np.random.default_rng(SEED).permutation(asked)[:count]
    truth = []
    for query, token in zip(queries[asked], tokens[asked].tolist(), strict=True):
        start, stop = entries.groups[token : token + 2].tolist()
        similarities = entries.vectors[start:stop] @ query
        best = np.argpartition(-similarities, K - 1)[:K] if stop - start > K else np.arange(stop - start)
        truth.append(start + best)
    return Questions(queries[asked], tokens[asked], truth)


def recall_of(peer: Peer, setting: Any, questions: Questions, rows: Sequence[int]) -> float:
    """Return the part of the true neighbours of some queries that are found."""
    shared = wanted = 0
    for row in rows:
        found = peer.ask(setting, questions.queries[row], int(questions.tokens[row]))()
        found = found[found >= 0]
        if isinstance(peer, Ours):
            found = peer.order[found]
        shared += len(np.intersect1d(found, questions.truth[row]))
        wanted += len(questions.truth[row])
    return shared / wanted


def choose(peer: Peer, questions: Questions, rows: Sequence[int], target: float) -> Chosen:
    """Return the setting of a peer that is fastest at the recall that is wanted, or else finds the most."""
    tried = []
    for name, setting in peer.settings.items():
        calls = [peer.ask(setting, questions.queries[row], int(questions.tokens[row])) for row in rows]
        probe = float(np.median(time_calls(calls[:10]))) / 1e6
        if probe > LONGEST_SECONDS:
            progress(f"  {peer.name}, {name}: {probe:.2f} s a query, left out")
            continue
        found = recall_of(peer, setting, questions, rows)
        mean = float(np.mean(time_calls(calls)))
        progress(f"  {peer.name}, {name}: recall {found:.4f}, {mean:,.0f} µs a query")
        tried.append((found >= target, -mean if found >= target else found, name, setting))
    if not tried:
        raise SystemExit(f"every setting of {peer.name} takes longer than {LONGEST_SECONDS} s")
    reached, _, name, setting = max(tried, key=lambda each: each[:2])
    return Chosen(f"{peer.name}, {name}", peer, setting, reached)


def measure(
    systems: Sequence[Chosen], questions: Questions, rows: Sequence[int], entries: int
) -> list[dict[str, Any]]:
    """Time all systems on the same queries, and count what they find."""
    calls = {
        system.label: [
            system.peer.ask(system.setting, questions.queries[row], int(questions.tokens[row]))
            for row in rows
        ]
        for system in systems
    }
    with undisturbed():
        for each in calls.values():
            time_calls(each[:20])
        times = time_in_turn(calls, np.random.default_rng(SEED))
    return [
        {
            "system": system.label,
            "reached": system.reached,
            "recall_at_10": round(recall_of(system.peer, system.setting, questions, rows), 4),
            "us": percentiles(times[system.label]),
            "bytes_per_entry": round(system.peer.size / entries, 1),
            "build_seconds": round(system.peer.build_seconds, 1),
        }
        for system in systems
    ]


def show(rows: Sequence[dict[str, Any]], entries: int) -> None:
    """Print the table."""
    table = [
        [row["system"], row["recall_at_10"], row["us"]["p50"], row["us"]["p99"], row["us"]["mean"],
         row["bytes_per_entry"], row["build_seconds"], "" if row["reached"] else "less recall than ours"]
        for row in rows
    ]  # fmt: skip
    columns = ["system, setting", "recall@10", "p50 µs", "p99", "mean", "bytes/entry", "build s", ""]
    show_table(f"ten nearest of {entries:,} entries with the wanted first token, one core", columns, table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, help="a DReSD store of float16 vectors")
    parser.add_argument(
        "--queries", type=Path, required=True,
        help="npz file of projected states, `queries` float32 [n, dims], and what came next, `tokens` int32 [n]",
    )  # fmt: skip
    parser.add_argument("--entries", type=int, default=2_000_000, help="default: %(default)s")
    parser.add_argument(
        "--noise", type=float, default=0.75,
        help="length of the noise of a copy, its vector being 1 long (default: %(default)s, a cosine of 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--count", type=int, default=2000, help="queries that are timed (default: %(default)s)"
    )
    parser.add_argument("--tuning", type=int, default=200, help="others that settings are chosen on")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, help="default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few entries and queries: to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.entries, args.count, args.tuning = 20_000, 100, 50
    return args


def main() -> None:
    """Build everything, choose settings, measure."""
    args = parse_arguments()
    try:
        entries = read_entries(args.store, args.entries, args.noise)
    except DraftstoreError as error:
        raise SystemExit(f"error: {error}") from error
    questions = read_questions(args.queries, entries, args.count + args.tuning)
    total, tuning = len(entries.vectors), range(min(args.tuning, len(questions.truth) // 2))
    progress(f"{total:,} entries, {len(questions.truth):,} queries")
    half, whole = Ours(entries, "float16"), Ours(entries, "int8")
    target = recall_of(half, half.settings["default"], questions, tuning)
    systems = [
        Chosen(f"{peer.name}, {name}", peer, setting, reached=True)
        for peer in (half, whole)
        for name, setting in peer.settings.items()
    ]
    peers = build_peers(entries, list(args.peers))
    faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))  # for building
    for peer in peers:
        faiss.omp_set_num_threads(1)
        systems.append(choose(peer, questions, tuning, target))
        faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))
    faiss.omp_set_num_threads(1)
    rows = measure(systems, questions, range(len(tuning), len(questions.truth)), total)
    show(rows, total)
    sizes = np.diff(entries.groups)[questions.tokens]
    document = {
        **describe_machine(("faiss-cpu", "scann")),
        "entries": total,
        "dims": entries.vectors.shape[1],
        "noise": args.noise,
        "copies": round(entries.copies, 3),
        "groups_of_queries": {f"p{part}": int(np.percentile(sizes, part)) for part in (10, 50, 90, 99)},
        "systems": rows,
    }
    finish(args.out, "dresd_search", document)


if __name__ == "__main__":
    main()
