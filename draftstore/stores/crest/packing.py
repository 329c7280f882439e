"""Packing a CREST store: trees are cut and compressed in ranking order, and written up to the size limit."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.search.cutting import Trees, draw_trees
from draftstore.search.expand import Rule
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.crest.entries import key_dtype, write_lmdb
from draftstore.stores.crest.envelope import Entry, Envelope, entry_bytes, train_dictionary
from draftstore.stores.crest.selection import Ranking

BLOCK = 8192
"""n-grams cut and compressed at a time."""
DICTIONARY_SAMPLES = 10_000
USUAL_ENTRY_BYTES = 100
"""Estimated size of an entry: determines how many n-grams are first ranked for a byte limit."""

OnPacked = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Cutter:
    """Parameters for drawing trees of at most `nodes` nodes by a rule, on `workers` threads (None: all cores)."""

    index: SuffixIndex
    nodes: int
    rule: Rule
    workers: int | None

    def trees(self, ngrams: NDArray[np.int32]) -> Trees:
        """Return the trees of n-grams int32 [k, n]."""
        return draw_trees(self.index, self.rule, ngrams, self.nodes, self.workers)


class PackedNgram(NamedTuple):
    """An n-gram of a store, in selection order."""

    tokens: list[int]
    occurrences: int
    distinct: int
    nodes: int
    raw_bytes: int
    key: bytes
    value: bytes

    @property
    def stored_bytes(self) -> int:
        """Size of the entry in an LMDB page: header and pointer included, rounded up to an even number of bytes."""
        return 10 + (len(self.key) + len(self.value) + 1) // 2 * 2


def pack_best(
    cutter: Cutter, rank: Callable[[int], Ranking], ngrams: int, max_bytes: int | None, on_packed: OnPacked
) -> tuple[bytes, list[PackedNgram]]:
    """Return a dictionary and the packed n-grams, best first; with a byte limit, enough of them to reach it.

    Args:
        rank: returns a ranking of at most so many n-grams.
        ngrams: maximum number of n-grams.
        max_bytes: maximum bytes of their entries.
        on_packed: receives done and total, in n-grams, or bytes if limited.
    """
    most = ngrams if max_bytes is None else min(ngrams, max_bytes // USUAL_ENTRY_BYTES)
    while True:
        ranking = rank(most)
        dictionary = _train(cutter, ranking)
        packed = _pack(cutter, ranking, Envelope(dictionary), max_bytes, on_packed)
        size = sum(item.stored_bytes for item in packed)
        if max_bytes is None or size > max_bytes or len(ranking.places) < most or most == ngrams:
            return dictionary, packed
        most = min(ngrams, int(most * max(2.0, 1.2 * max_bytes / max(size, 1))))  # entries are small


def _train(cutter: Cutter, ranking: Ranking) -> bytes:
    """Return a dictionary trained on evenly spaced n-grams of a ranking."""
    size = len(ranking.places)
    chosen = np.unique(np.linspace(0, size - 1, min(size, DICTIONARY_SAMPLES)).astype(np.int64))
    return train_dictionary([entry for _, entry, _ in _cut(cutter, ranking, chosen)])


def _pack(
    cutter: Cutter,
    ranking: Ranking,
    envelope: Envelope,
    max_bytes: int | None,
    on_packed: OnPacked,
) -> list[PackedNgram]:
    """Draw and compress the trees of n-grams until `max_bytes` is reached; n-grams without a tree are skipped."""
    packed: list[PackedNgram] = []
    dtype = key_dtype(cutter.index.vocab_size)
    size, total = 0, len(ranking.places)
    for start in range(0, total, BLOCK):
        block = np.arange(start, min(start + BLOCK, total))
        cut = list(_cut(cutter, ranking, block))
        for (tokens, entry, raw), value in zip(cut, envelope.pack([raw for _, _, raw in cut]), strict=True):
            key = np.array(tokens, dtype).tobytes()
            numbers = (entry.occurrences, entry.distinct, len(entry.tree), len(raw))
            packed.append(PackedNgram(tokens, *numbers, key, value))
            size += packed[-1].stored_bytes
        if max_bytes is None:
            on_packed(int(block[-1]) + 1, total)
        else:
            on_packed(min(size, max_bytes), max_bytes)
            if size > max_bytes:
                break
    return packed


def _cut(
    cutter: Cutter, ranking: Ranking, chosen: NDArray[np.int64]
) -> Iterator[tuple[list[int], Entry, bytes]]:
    """Cut the trees of n-grams; yield those with a tree, in order, with their bytes."""
    found: dict[int, tuple[list[int], Entry, bytes]] = {}
    for n, table in enumerate(ranking.tables, 1):
        ranks = chosen[ranking.lengths[chosen] == n]
        ngrams = np.ascontiguousarray(table.tokens[ranking.places[ranks]], np.int32)
        trees = cutter.trees(ngrams)
        for place, (rank, tokens) in enumerate(zip(ranks.tolist(), ngrams.tolist(), strict=True)):
            entry = Entry(trees.tree(place), int(trees.counts[place]), int(trees.distinct[place]))
            if len(entry.tree):
                found[rank] = (tokens, entry, entry_bytes(entry))
    for rank in chosen.tolist():
        if rank in found:
            yield found[rank]


def write_best(path: Path, packed: Sequence[PackedNgram], max_bytes: int | None) -> list[PackedNgram]:
    """Write the best n-grams to an LMDB file of at most `max_bytes` and return them."""
    if max_bytes is not None:
        sizes = np.cumsum([item.stored_bytes for item in packed])
        packed = packed[: int(np.searchsorted(sizes, max_bytes, "right"))]
    while True:
        size = write_lmdb(path, sorted((item.key, item.value) for item in packed))
        if max_bytes is None or size <= max_bytes:
            return list(packed)
        # Pages have free space: drop the excess, and at least one n-gram.
        packed = packed[: min(int(len(packed) * max_bytes / size), len(packed) - 1)]


def write_ngrams(path: Path, packed: Sequence[PackedNgram]) -> None:
    """Write the n-grams of a store as Parquet, in selection order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "rank": pa.array(range(1, len(packed) + 1), pa.int32()),
        "n": pa.array([len(item.tokens) for item in packed], pa.uint8()),
        "tokens": pa.array([item.tokens for item in packed], pa.list_(pa.uint32())),
        "count": pa.array([item.occurrences for item in packed], pa.int64()),
        "distinct": pa.array([item.distinct for item in packed], pa.int64()),
        "nodes": pa.array([item.nodes for item in packed], pa.int16()),
        "raw_bytes": pa.array([item.raw_bytes for item in packed], pa.int32()),
        "bytes": pa.array([len(item.value) for item in packed], pa.int32()),
    }
    pq.write_table(pa.table(columns), path, compression="zstd")
