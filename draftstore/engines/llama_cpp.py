"""Followers of token pairs, as a static n-gram cache for llama.cpp's lookup decoding (`--lookup-cache-static`).

    i32 [4]        two tokens, then -1 -1 (llama.cpp has room for four; it queries the static cache with two)
    i32            number of followers, at least 1
    i32 [any, 2]   token and count of each, counts at least 1

The file is a sequence of such records, little-endian, without header or order. The format is that of
common/ngram-cache.cpp of llama.cpp at 5c5f166e.

From the static cache alone, llama.cpp drafts the most common follower if the counts of all followers sum to at least 2
and it has half of them or more. By default, only that follower is written: the drafts are the same as with the whole
table, and llama.cpp keeps a hash map for each n-gram. A follower that occurs once is written as if it occurred twice;
otherwise an answer that is in the store once would never be drafted. A count also weights candidates from the text so
far, by 100 times its value; the whole table was no better at this (docs/llama-cpp.md).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.errors import BuildError, StoreError, needs_extra
from draftstore.options import Bytes, Options, Shown
from draftstore.search.ngrams import PART_ROWS, NgramTable, count_ngrams
from draftstore.storage.access import denied_bits, deny
from draftstore.storage.files import replacing
from draftstore.storage.locks import StoreLease
from draftstore.storage.manifest import MANIFEST_NAME, Manifest, load_manifest
from draftstore.storage.progress import OnProgress, Progress, silent
from draftstore.stores.crest.counts import KIND as COUNTS
from draftstore.stores.crest.counts import parquet_name
from draftstore.stores.rest.store import KIND as REST
from draftstore.stores.rest.store import RestStore

LEAST_SUM = 2
"""Occurrences below which llama.cpp drafts nothing after two tokens; lower counts are raised to this."""
MAX_WEIGHT = 10_000
"""Maximum of a count: llama.cpp multiplies it by 100 and by a count in the text, in 32 bits."""
MAX_SUM = 20_000_000
"""Maximum sum of counts in a whole table, which is scaled down to it: llama.cpp multiplies it by 100, in 32 bits."""
HEAD = 5
"""Numbers of a record before its followers."""
CUT_NGRAMS = 1 << 20
"""N-grams that are moved at a time if a limit in bytes excludes some."""


class Followers(NamedTuple):
    """Some 2-grams and the followers of each, both ascending.

    Attributes:
        ngrams: [k, 2], tokens.
        sizes: int64 [k], number of followers of each.
        tokens: [m], followers of the first 2-gram, of the second, ...
        counts: int64 [m], occurrences of each follower, at least 1.
    """

    ngrams: NDArray[Any]
    sizes: NDArray[np.int64]
    tokens: NDArray[Any]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, table: NgramTable) -> "Followers":
        """Return the followers of each 2-gram in an ascending table of 3-grams."""
        pairs = table.tokens[:, :2]
        new = np.append(True, (pairs[1:] != pairs[:-1]).any(axis=1))[: len(pairs)]
        starts = np.flatnonzero(new)
        return cls(pairs[starts], np.diff(np.append(starts, len(pairs))), table.tokens[:, 2], table.counts)

    @property
    def starts(self) -> NDArray[np.int64]:
        """int64 [k], place of the first follower of each."""
        return np.cumsum(self.sizes) - self.sizes

    def sums(self) -> NDArray[np.int64]:
        """int64 [k], occurrences of all followers of each."""
        return np.add.reduceat(self.counts, self.starts) if len(self.sizes) else self.sizes

    def best(self) -> NDArray[np.int64]:
        """int64 [k], place of the most common follower of each; the smallest token among equals."""
        if not len(self.sizes):
            return self.sizes
        most = np.repeat(np.maximum.reduceat(self.counts, self.starts), self.sizes)
        places = np.flatnonzero(self.counts == most)
        return places[np.searchsorted(places, self.starts)]

    def select(self, chosen: NDArray[np.bool_]) -> "Followers":
        """Return some 2-grams; `chosen` is bool [k]."""
        kept = np.repeat(chosen, self.sizes)
        return Followers(self.ngrams[chosen], self.sizes[chosen], self.tokens[kept], self.counts[kept])

    def encode(self) -> NDArray[np.int32]:
        """Return the records, int32 [5 k + 2 m]."""
        words = HEAD + 2 * self.sizes
        heads = np.cumsum(words) - words
        records = np.full(int(words.sum()), -1, "<i4")
        records[heads], records[heads + 1] = self.ngrams[:, 0], self.ngrams[:, 1]
        records[heads + 4] = self.sizes
        places = np.repeat(heads + HEAD - 2 * self.starts, self.sizes) + 2 * np.arange(len(self.tokens))
        records[places], records[places + 1] = self.tokens, self.counts
        return records


class Export(NamedTuple):
    """An exported file.

    Attributes:
        path: the file.
        ngrams: number of its 2-grams.
        followers: number of their followers.
        left_out: number of 2-grams excluded by a limit in bytes.
        size: bytes of the file.
    """

    path: Path
    ngrams: int
    followers: int
    left_out: int
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
    whole: Annotated[bool, Shown(flags=("--all",))] = Field(
        False, description="Write all followers of all pairs, not only the one that llama.cpp drafts."
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
    whole, max_bytes, on_rows = options.whole, options.max_bytes, progress("counting", "rows")
    lease = StoreLease(store)
    try:
        with replacing(out) as temporary, temporary.open("w+b") as file:
            deny(temporary, denied_bits([store / MANIFEST_NAME]))
            values, words = _write(file, _tables(store, manifest, on_rows), options.min_count, whole=whole)
            kept = words if max_bytes is None else _cut(file, values, words, max_bytes)
            if not len(kept):
                raise _nothing(store, options, max_bytes if len(words) else None)
    finally:
        lease.close()
    followers = int((kept - HEAD).sum()) // 2
    return Export(out, len(kept), followers, len(words) - len(kept), 4 * int(kept.sum()))


def _nothing(store: Path, options: ExportOptions, max_bytes: int | None) -> BuildError:
    """Explain why no record is left, and what to do; `max_bytes` is None if that is not the reason."""
    if max_bytes is not None:
        return BuildError(f"no pair of tokens fits into {max_bytes:,} bytes: allow more", "max_bytes")
    found = f"no pair of tokens in {store} has a follower that occurs {options.min_count:,} times"
    half = "" if options.whole else " and makes up half of all followers"
    return BuildError(f"{found}{half}: allow rarer ones", "min_count")


def _tables(store: Path, manifest: Manifest, on_rows: OnProgress) -> Iterator[NgramTable]:
    """Yield the 3-grams of a store, ascending; those with the same first two tokens are in one table."""
    if manifest.kind == COUNTS:
        if manifest.parameters["max_n"] < 3:
            raise StoreError(
                f"{store} counts n-grams of at most two tokens: count again those of three", "max_n"
            )
        yield from _counted(store / parquet_name(3), on_rows)
    elif manifest.kind == REST:
        index = RestStore.open(store).index
        for tables in count_ngrams(index, 3, on_rows=on_rows):
            yield tables[2]
    else:
        raise StoreError(
            f"{store} is a store of kind {manifest.kind!r}, which keeps drafts but no counts: export the REST store "
            "that it was built from, or its counts (draftstore count)"
        )


def _counted(path: Path, on_rows: OnProgress) -> Iterator[NgramTable]:
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


def _write(
    file: BinaryIO, tables: Iterator[NgramTable], least: int, *, whole: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Write all records; return int64 [k] each: how useful each 2-gram is, and the size of its record in numbers."""
    values, words = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for table in tables:
        found = Followers.of(table)
        best, sums = found.best(), found.sums()
        most = found.counts[best]
        drafts = 2 * most >= sums
        chosen = (most >= least) & (drafts | whole)
        if whole:
            kept = _scaled(found.select(chosen))
        else:
            taken = best[chosen]
            counts = np.clip(found.counts[taken], LEAST_SUM, MAX_WEIGHT)
            kept = Followers(found.ngrams[chosen], np.ones_like(taken), found.tokens[taken], counts)
        file.write(kept.encode().tobytes())
        values.append(np.where(drafts, most, most - (1 << 40))[chosen])
        words.append(HEAD + 2 * kept.sizes)
    return np.concatenate(values), np.concatenate(words)


def _scaled(found: Followers) -> Followers:
    """Return followers with counts whose sums do not overflow in llama.cpp and are large enough for it."""
    sums = np.repeat(found.sums(), found.sizes)
    counts = found.counts * MAX_SUM // np.maximum(sums, MAX_SUM)
    return found._replace(counts=np.maximum(counts, np.where(sums < LEAST_SUM, LEAST_SUM, 1)))


def _cut(
    file: BinaryIO, values: NDArray[np.int64], words: NDArray[np.int64], max_bytes: int
) -> NDArray[np.int64]:
    """Cut a file down to its most useful records, the first among equals; return the sizes of those that remain."""
    order = np.argsort(-values, kind="stable")
    chosen = np.zeros(len(words), np.bool_)
    chosen[order[4 * np.cumsum(words[order]) <= max_bytes]] = True
    read = written = 0
    for begin in range(0, len(words), CUT_NGRAMS):
        part = slice(begin, begin + CUT_NGRAMS)
        file.seek(read)
        records = np.frombuffer(file.read(4 * int(words[part].sum())), "<i4")
        read = file.tell()
        file.seek(written)
        written += file.write(records[np.repeat(chosen[part], words[part])].tobytes())
    file.truncate(written)
    return words[chosen]
