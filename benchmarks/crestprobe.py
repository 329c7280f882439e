"""Steps of a CREST build, each measured in a fresh process: `python -m benchmarks.crestprobe JSON`.

Counting n-grams, polars counting the same, and what follows: ranking, cutting trees, compressing, writing LMDB. Used
by benchmarks.crest.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import lmdb
import numpy as np
import polars as pl

from benchmarks.buildprobe import warm_up_sorting
from benchmarks.common import index_tokens
from benchmarks.measure import peak_resident, percentiles, reset_peak, time_calls, undisturbed
from benchmarks.queryprobe import map_pages
from draftstore.jit import CORES
from draftstore.search.cutting import Trees, cut_trees
from draftstore.search.ngrams import count_ngrams
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.crest.counts import build_counts, parquet_name
from draftstore.stores.crest.entries import key_dtype, write_lmdb
from draftstore.stores.crest.envelope import Entry, Envelope, entry_bytes, train_dictionary
from draftstore.stores.crest.selection import SELECTIONS, Ranking, rank_ngrams
from draftstore.stores.crest.store import BUDGET, STRATEGIES
from draftstore.stores.rest.store import CONTINUATION, RestStore
from draftstore.trees.tree import DraftTree

REPEATS = 3
DICTIONARY_SAMPLES = 10_000
DECODED = 20_000
ENTRY_HEAD = 8
"""Bytes before the tree in an entry."""


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = perf_counter()
    work()
    return perf_counter() - begin


def times_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return how long a call takes, and the time that all cores spend on it: the second tells on a busy machine."""
    begin = process_time()
    wall = seconds_of(work)
    return wall, process_time() - begin


def rounded(seconds: float) -> float:
    """Round a duration to milliseconds."""
    return round(seconds, 3)


def small_index(vocab_size: int) -> SuffixIndex:
    """Return an index of few tokens, to compile or load kernels with before anything is timed."""
    warm_up_sorting(vocab_size)
    tokens = np.append(np.random.default_rng(0).integers(0, 50, 5000), 65535).astype(np.uint16)
    return index_tokens(tokens, vocab_size)


def measure_counting(store: str, max_n: int, counts: str) -> dict[str, Any]:
    """Count n-grams in memory, then into Parquet files; the store's pages are in memory, and count as memory."""
    index = RestStore.open(store).index
    _count(small_index(index.vocab_size), max_n)
    map_pages(index)
    reset_peak()
    seconds, cpu = zip(*(times_of(partial(_count, index, max_n)) for _ in range(REPEATS)), strict=True)
    peak = peak_resident()
    with_files = seconds_of(lambda: build_counts(Path(store), Path(counts), max_n=max_n, overwrite=True))
    parquet_bytes = [(Path(counts) / parquet_name(n)).stat().st_size for n in range(1, max_n + 1)]
    return {
        "threads": CORES,
        "seconds": rounded(median(seconds)),
        "all_seconds": list(map(rounded, seconds)),
        "cpu_seconds": rounded(median(cpu)),
        "peak_bytes": peak,
        "store_bytes": sum(array.nbytes for array in index[:5]),
        "distinct": _count(index, max_n),
        "parquet": {"seconds": rounded(with_files), "peak_bytes": peak_resident(), "bytes": parquet_bytes},
    }


def _count(index: SuffixIndex, max_n: int) -> list[int]:
    """Count, and return how many distinct n-grams of each length there are."""
    sizes = np.zeros(max_n, np.int64)
    for tables in count_ngrams(index, max_n):
        sizes += [len(table.counts) for table in tables]
    found: list[int] = sizes.tolist()
    return found


def measure_polars(store: str, max_n: int, counts: str) -> dict[str, Any]:
    """Have polars count the same n-grams with `group_by`, and compare every row with the Parquet files of `counts`.

    Only `group_by` is timed, on a table that is ready: a column for each token of an n-gram.
    """
    index = RestStore.open(store).index
    lengths: list[dict[str, Any]] = []
    for n in range(1, max_n + 1):
        table = _windows(index, n)
        reset_peak()
        times = {engine: times_of(partial(_group, table, engine)) for engine in ("in-memory", "streaming")}
        peak = peak_resident()
        ours = pl.read_parquet(Path(counts) / parquet_name(n))
        equal = _group(table, "in-memory").sort(table.columns).equals(ours)
        lengths.append({
            "n": n, "rows": len(ours), "equal": equal, "peak_bytes": peak,
            "seconds": {engine: rounded(wall) for engine, (wall, _) in times.items()},
            "cpu_seconds": {engine: rounded(cpu) for engine, (_, cpu) in times.items()},
        })  # fmt: skip
        if not equal:
            raise SystemExit(f"polars counts other {n}-grams than draftstore does")
    return {
        **{
            key: rounded(sum(min(each[key].values()) for each in lengths))
            for key in ("seconds", "cpu_seconds")
        },
        "peak_bytes": max(each["peak_bytes"] for each in lengths),
        "lengths": lengths,
    }


def _windows(index: SuffixIndex, n: int) -> pl.DataFrame:
    """Return all n-grams inside documents, a column for each of their tokens."""
    tokens = np.asarray(index.tokens)
    count = len(tokens) - n + 1
    inside = np.ones(count, np.bool_)
    for j in range(n):
        inside &= tokens[j : j + count] < index.vocab_size
    return pl.DataFrame({f"t{j + 1}": tokens[j : j + count][inside] for j in range(n)})


def _group(table: pl.DataFrame, engine: Any) -> pl.DataFrame:
    """Count equal rows."""
    counts = pl.len().cast(pl.Int64).alias("count")
    return table.lazy().group_by(table.columns).agg(counts).collect(engine=engine)


def measure_steps(store: str, max_n: int, ngrams: int, scratch: str) -> dict[str, Any]:
    """Rank n-grams by every selection; cut, compress, decode and write the trees of those that `gain` ranks first."""
    opened = RestStore.open(store)
    index = opened.index
    rank = partial(rank_ngrams, depth=CONTINUATION, trust=STRATEGIES["backoff"])
    for selection in SELECTIONS:
        rank(small_index(index.vocab_size), selection, max_n, 10)
    map_pages(index)
    ranking = {name: rounded(seconds_of(partial(rank, index, name, max_n, ngrams))) for name in SELECTIONS}
    ranked = rank(index, SELECTIONS[0], max_n, ngrams)
    cutting = {
        label: rounded(seconds_of(partial(_cut, index, ranked, workers)))
        for label, workers in (("one_core", 1), ("all_cores", None))
    }
    keys, raw = _entries(index, ranked, key_dtype(index.vocab_size))
    return {
        "ngrams": len(ranked.places),
        "threads": CORES,
        "ranking_seconds": ranking,
        "cutting": {
            "seconds": cutting,
            "trees_per_second": {name: round(len(ranked.places) / took) for name, took in cutting.items()},
        },
        **_compress_and_write(keys, raw, Path(scratch)),
    }


def _cut(index: SuffixIndex, ranked: Ranking, workers: int | None) -> list[tuple[Any, Trees]]:
    """Return the n-grams of each length, and their trees."""
    found = []
    for n, table in enumerate(ranked.tables, 1):
        ngrams = np.ascontiguousarray(table.tokens[ranked.places[ranked.lengths == n]], np.int32)
        found.append((ngrams, cut_trees(index, ngrams, BUDGET, CONTINUATION, workers)))
    return found


def _entries(index: SuffixIndex, ranked: Ranking, dtype: Any) -> tuple[list[bytes], list[bytes]]:
    """Return keys and entries before compression, in key order."""
    pairs = []
    for ngrams, trees in _cut(index, ranked, None):
        for place, ngram in enumerate(ngrams):
            entry = Entry(trees.tree(place), int(trees.counts[place]), int(trees.distinct[place]))
            if len(entry.tree):
                pairs.append((ngram.astype(dtype).tobytes(), entry_bytes(entry)))
    pairs.sort()
    return [key for key, _ in pairs], [data for _, data in pairs]


def _compress_and_write(keys: Sequence[bytes], raw: Sequence[bytes], scratch: Path) -> dict[str, Any]:
    """Train a dictionary, compress, decode, and write to LMDB."""
    samples = raw[:: max(1, len(raw) // DICTIONARY_SAMPLES)][:DICTIONARY_SAMPLES]
    training = seconds_of(lambda: train_dictionary(samples))
    envelope = Envelope(train_dictionary(samples))
    packing = seconds_of(lambda: envelope.pack(raw))
    values = envelope.pack(raw)
    items = list(zip(keys, values, strict=True))
    writing = [seconds_of(lambda: write_lmdb(scratch / "write.lmdb", items)) for _ in range(REPEATS)]
    appending = [seconds_of(lambda: _append(scratch / "append.lmdb", items)) for _ in range(REPEATS)]
    places = np.random.default_rng(0).permutation(len(raw))[:DECODED].tolist()
    with undisturbed():
        packed_us = time_calls([partial(envelope.open, values[place]) for place in places])
        raw_us = time_calls(
            [partial(DraftTree.from_bytes, memoryview(raw[place])[ENTRY_HEAD:]) for place in places]
        )
    return {
        "compressing": {
            "entries": len(raw),
            "raw_bytes_an_entry": round(sum(map(len, raw)) / len(raw), 1),
            "bytes_an_entry": round(sum(map(len, values)) / len(raw), 1),
            "dictionary_seconds": rounded(training),
            "seconds": rounded(packing),
            "us_an_entry": round(1e6 * packing / len(raw), 1),
        },
        "decode_us": {"compressed": percentiles(packed_us), "raw": percentiles(raw_us)},
        "lmdb": {
            "rows": len(items),
            "bytes": (scratch / "write.lmdb").stat().st_size,
            "append_rows_per_second": round(len(items) / median(appending)),
            "append_copy_sync_rows_per_second": round(len(items) / median(writing)),
        },
    }


def _append(path: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Append sorted rows to a new file in one transaction."""
    path.unlink(missing_ok=True)
    size = 2 * sum(len(key) + len(value) + 16 for key, value in items) + (1 << 20)
    with (
        lmdb.open(str(path), subdir=False, map_size=size, lock=False, sync=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.cursor().putmulti(items, dupdata=False, overwrite=False, append=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    measure: Any = {"counting": measure_counting, "polars": measure_polars, "steps": measure_steps}
    print(json.dumps(measure[arguments.pop("what")](**arguments)))
