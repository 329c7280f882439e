"""Followers of token pairs, as a static n-gram cache for llama.cpp's lookup decoding (`--lookup-cache-static`).

    i32 [4]        two tokens, then -1 -1 (llama.cpp has room for four; it queries the static cache with two)
    i32            number of followers, here 1
    i32 [1, 2]     its token and count

The file is a sequence of such records, little-endian, without header or order. The format is that of
common/ngram-cache.cpp of llama.cpp at 5c5f166e.

From the static cache alone, llama.cpp drafts the most common follower if the counts of all followers sum to at least 2
and it has half of them or more. Only that follower is written: the drafts are the same as with the whole table, and
llama.cpp keeps a hash map for each n-gram. A follower that occurs once is written as if it occurred twice; otherwise an
answer that is in the store once would never be drafted. A count also weights candidates from the text so far, by 100
times its value; the whole table was no better at this (docs/llama-cpp.md).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.errors import BuildError, StoreError, needs_extra
from draftstore.options import Bytes, Options
from draftstore.search.ngrams import PART_ROWS, NgramTable, count_ngrams
from draftstore.storage.files import denied_bits, deny, replacing
from draftstore.storage.locks import lease
from draftstore.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from draftstore.storage.report import OnProgress, Progress, silent
from draftstore.stores.crest.counts import KIND as COUNTS
from draftstore.stores.crest.counts import parquet_name
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore

LEAST_SUM = 2
"""Occurrences below which llama.cpp drafts nothing after two tokens; lower counts are raised to this."""
MAX_WEIGHT = 10_000
"""Maximum of a count: llama.cpp multiplies it by 100 and by a count in the text, in 32 bits."""
RECORD = 7
"""Numbers of a record."""
CUT_NGRAMS = 1 << 20
"""N-grams that are moved at a time if a limit in bytes excludes some."""


class Export(NamedTuple):
    """An exported file.

    Attributes:
        path: the file.
        ngrams: number of its 2-grams.
        omitted: number of 2-grams excluded by a limit in bytes.
        size: bytes of the file.
    """

    path: Path
    ngrams: int
    omitted: int
    size: int


class ExportOptions(Options):
    """What to write, and how much of it."""

    min_count: int = Field(
        1, ge=1, description="Leave out pairs of tokens whose best follower occurs fewer times."
    )
    max_bytes: Bytes | None = Field(
        None,
        description="Keep as many pairs as fit into this size, such as 10MB: those whose drafts are right most often.",
    )


def export_cache(
    store: Path,
    out: Path,
    options: ExportOptions = ExportOptions(),  # noqa: B008 (it never changes)
    *,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Export:
    """Write the followers of a store's token pairs as a static cache of llama.cpp; the file appears once complete.

    Args:
        store: a REST store, or its counts.
        options: what to write; if space is limited, 2-grams that yield drafts come first, by the count of the most
            common follower.
        overwrite: whether to replace an existing file.
        progress: receives the progress of each step.

    Raises:
        BuildError: `out` exists, or there is nothing to write.
        StoreError: the store cannot be opened, or is of another kind.
    """
    if out.is_dir():
        raise BuildError(f"{out} is a directory: name a file", "out")
    if out.exists() and not overwrite:
        raise BuildError(f"{out} exists: choose another file, or replace it", "overwrite")
    manifest = load_manifest(store)
    out.parent.mkdir(parents=True, exist_ok=True)
    max_bytes, on_rows = options.max_bytes, progress("counting", "rows")
    held = lease(store)
    try:
        with replacing(out) as temporary, temporary.open("w+b") as file:
            deny(temporary, denied_bits([store / MANIFEST_NAME]))
            counts = _write(file, _tables(store, manifest, on_rows), options.min_count)
            if not len(counts):
                raise BuildError(
                    f"no pair of tokens in {store} has a follower that occurs {options.min_count:,} times and makes up "
                    "half of all followers: allow rarer ones",
                    "min_count",
                )
            kept = len(counts) if max_bytes is None else _cut(file, counts, max_bytes // (4 * RECORD))
            if not kept:
                raise BuildError(f"no pair of tokens fits into {max_bytes:,} bytes: allow more", "max_bytes")
    finally:
        held.close()
    return Export(out, kept, len(counts) - kept, 4 * RECORD * kept)


def _tables(store: Path, manifest: Manifest, on_rows: OnProgress) -> Iterator[NgramTable]:
    """Yield the 3-grams of a store, ascending; those with the same first two tokens are in one table."""
    if manifest.kind == COUNTS:
        if manifest.parameters["max_n"] < 3:
            raise StoreError(
                f"{store} counts n-grams of at most two tokens: count again those of three", "max_n"
            )
        yield from _tables_of_counts(store / parquet_name(3), on_rows)
    elif manifest.kind == REST:
        index = RestStore.open(store).index
        for tables in count_ngrams(index, 3, on_rows=on_rows):
            yield tables[2]
    else:
        raise StoreError(
            f"{store} is a store of kind {manifest.kind!r}, which keeps drafts but no counts: export the REST store "
            "that it was built from, or its counts (draftstore count)"
        )


def _tables_of_counts(path: Path, on_rows: OnProgress) -> Iterator[NgramTable]:
    """Yield the 3-grams of a Parquet file; those of a batch's last 2-gram are carried over to the next batch."""
    with needs_extra("pyarrow"):
        import pyarrow.parquet as pq
    with pq.ParquetFile(path) as file:
        total, done = file.metadata.num_rows, 0
        rest: NgramTable | None = None
        for batch in file.iter_batches(batch_size=PART_ROWS):
            *columns, counts = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            table = NgramTable(np.stack(columns, axis=1), counts)
            if rest is not None:
                table = NgramTable(*map(np.concatenate, zip(rest, table, strict=True)))
            last = int(np.flatnonzero((table.tokens[:, :2] == table.tokens[-1, :2]).all(axis=1))[0])
            yield NgramTable(table.tokens[:last], table.counts[:last])
            rest = NgramTable(table.tokens[last:], table.counts[last:])
            done += len(counts)
            on_rows(done, total)
        if rest is not None:
            yield rest


def _write(file: BinaryIO, tables: Iterator[NgramTable], least: int) -> NDArray[np.int64]:
    """Write all records; return int64 [k], the occurrences of each follower."""
    counts = [np.empty(0, np.int64)]
    for table in tables:
        pairs, tokens, most = _best_followers(table, least)
        records = np.full((len(most), RECORD), -1, "<i4")
        records[:, :2], records[:, 4], records[:, 5] = pairs, 1, tokens
        records[:, 6] = np.clip(most, LEAST_SUM, MAX_WEIGHT)
        file.write(records.tobytes())
        counts.append(most)
    return np.concatenate(counts)


def _best_followers(table: NgramTable, least: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Return the pairs in an ascending table of 3-grams that draft, [k, 2], the follower of each, and its occurrences.

    It is the most common one, the smallest token among equals.
    """
    pairs, counts = table.tokens[:, :2], table.counts
    starts = np.flatnonzero(np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))[: len(pairs)])
    sums, most = np.add.reduceat(counts, starts), np.maximum.reduceat(counts, starts)
    places = np.flatnonzero(counts == np.repeat(most, np.diff(np.append(starts, len(pairs)))))
    best = places[np.searchsorted(places, starts)][(most >= least) & (2 * most >= sums)]
    return pairs[best], table.tokens[best, 2], counts[best]


def _cut(file: BinaryIO, counts: NDArray[np.int64], most: int) -> int:
    """Cut a file down to its `most` most useful records, the first among equals; return the number that remains."""
    chosen = np.zeros(len(counts), np.bool_)
    chosen[np.argsort(-counts, kind="stable")[:most]] = True
    read = written = 0
    for begin in range(0, len(counts), CUT_NGRAMS):
        part = chosen[begin : begin + CUT_NGRAMS]
        file.seek(read)
        records = np.frombuffer(file.read(4 * RECORD * len(part)), "<i4").reshape(-1, RECORD)
        read = file.tell()
        file.seek(written)
        written += file.write(records[part].tobytes())
    file.truncate(written)
    return int(chosen.sum())
