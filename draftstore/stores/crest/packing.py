"""Packing a CREST store: trees are cut and compressed in ranking order, and written up to the size limit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.search.cutting import Trees
from draftstore.storage.report import OnProgress
from draftstore.stores.crest.codes import EntryCodec, fit_codes
from draftstore.stores.crest.entries import write_lmdb
from draftstore.stores.crest.selection import Ranking
from draftstore.trees.batch import DraftBatch

BLOCK = 8192
"""n-grams cut and compressed at a time."""
DICTIONARY_SAMPLES = 10_000
USUAL_ENTRY_BYTES = 100
"""Estimated size of an entry: determines how many n-grams are first ranked for a byte limit."""
COUNTS_BYTES = 8
"""Bytes of an entry's two counts in `raw_bytes`, which measures what the codes save."""

Draw = Callable[[NDArray[np.int32]], Trees]
"""Draws the trees of n-grams, int32 [k, n]."""


class PackedNgram(NamedTuple):
    """An n-gram of a store, in selection order."""

    tokens: list[int]
    key: bytes
    value: bytes
    occurrences: int
    distinct: int
    nodes: int
    raw_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Size of the entry in an LMDB page: header and pointer included, rounded up to an even number of bytes."""
        return 10 + (len(self.key) + len(self.value) + 1) // 2 * 2


def pack_best(
    draw: Draw,
    rank: Callable[[int], Ranking],
    key: np.dtype[Any],
    ngrams: int,
    max_bytes: int | None,
    on_packed: OnProgress,
) -> tuple[bytes, list[PackedNgram]]:
    """Return the codes and the packed n-grams, best first; with a byte limit, enough of them to reach it.

    `rank` returns a ranking of at most so many n-grams, `ngrams` and `max_bytes` limit n-grams and bytes of entries,
    and `on_packed` receives done and total, in n-grams, or bytes if limited.
    """
    most = ngrams if max_bytes is None else min(ngrams, max_bytes // USUAL_ENTRY_BYTES)
    while True:
        ranking = rank(most)
        total = len(ranking.places)
        samples = np.linspace(0, total - 1, min(total, DICTIONARY_SAMPLES)).astype(np.int64)
        codes = fit_codes(_draw(draw, ranking, np.unique(samples))[1])
        packed = _pack(draw, ranking, key, EntryCodec(codes), max_bytes, on_packed)
        size = sum(item.stored_bytes for item in packed)
        if max_bytes is None or size > max_bytes or total < most or most == ngrams:
            return codes, packed
        most = min(ngrams, int(most * max(2.0, 1.2 * max_bytes / max(size, 1))))  # entries are small


def _pack(
    draw: Draw,
    ranking: Ranking,
    key: np.dtype[Any],
    codec: EntryCodec,
    max_bytes: int | None,
    on_packed: OnProgress,
) -> list[PackedNgram]:
    """Draw and encode the trees of n-grams until `max_bytes` is reached."""
    packed: list[PackedNgram] = []
    size, total = 0, len(ranking.places)
    for start in range(0, total, BLOCK):
        block = np.arange(start, min(start + BLOCK, total))
        ngrams, trees = _draw(draw, ranking, block)
        lengths, _ = DraftBatch.plain(*trees[:3], trees.sizes.astype(np.int32)).encode_trees()
        numbers = np.stack([trees.counts, trees.distinct, trees.sizes, COUNTS_BYTES + lengths], axis=1)
        for tokens, row, value in zip(ngrams, numbers.tolist(), codec.encode(trees), strict=True):
            packed.append(PackedNgram(tokens, np.array(tokens, key).tobytes(), value, *row))
            size += packed[-1].stored_bytes
        if max_bytes is None:
            on_packed(int(block[-1]) + 1, total)
        else:
            on_packed(min(size, max_bytes), max_bytes)
            if size > max_bytes:
                break
    return packed


def _draw(draw: Draw, ranking: Ranking, chosen: NDArray[np.int64]) -> tuple[list[list[int]], Trees]:
    """Return those of the chosen n-grams that have a tree, in order, and their trees."""
    ngrams, ranks, parts = [], [], []
    for n, table in enumerate(ranking.tables, 1):
        ranks.append(chosen[ranking.lengths[chosen] == n])
        tokens = np.ascontiguousarray(table.tokens[ranking.places[ranks[-1]]], np.int32)
        ngrams += tokens.tolist()
        parts.append(draw(tokens))
    trees = Trees(*map(np.concatenate, zip(*parts, strict=True)))
    order = np.argsort(np.concatenate(ranks))
    order = order[trees.sizes[order] > 0]
    return [ngrams[place] for place in order.tolist()], Trees._make(array[order] for array in trees)


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
