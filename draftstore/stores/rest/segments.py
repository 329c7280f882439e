"""The arrays of a REST store: token shards laid out in segments, each sorted separately."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.cluster import Cluster
from draftstore.errors import BuildError
from draftstore.processes import map_apart
from draftstore.search.suffix import index_segment, segment_table
from draftstore.storage.files import remove, replacing, write_at
from draftstore.storage.report import OnProgress
from draftstore.storage.staging import require_space
from draftstore.text.tokens import TokenShards, sentinel, token_dtype

SMALL_TOKENS = 1 << 22
"""Segments up to this size are sorted in about a second, too little for a separate process."""


SORTED = "suffixes.bin", "keys.bin", "first_rows.bin"
"""The arrays that sorting writes."""
PARTS = "parts"
"""Folder beside the store for what the nodes of a cluster write."""


class Piece(NamedTuple):
    """Consecutive documents of a segment, each ended by the sentinel, and their digests, uint8 [documents, 16]."""

    tokens: NDArray[Any]
    digests: NDArray[np.uint8]


def lay_out(store: Path, segments: Iterable[Iterable[Piece]], vocab_size: int, size: int) -> None:
    """Write tokens.bin, documents.bin and segments.bin, about `size` tokens, and allocate the other arrays."""
    remove(store)
    store.mkdir()
    require_space(store, size * (token_dtype(vocab_size).itemsize + 4 + 1))
    table = _write_tokens(segments, store)
    total, _, keys = table[-1].tolist()
    sizes = 4 * total, 8 * keys, 4 * (len(table) - 1) * (vocab_size + 1)
    for name, length in zip(SORTED, sizes, strict=True):
        with (store / name).open("wb") as file:
            file.truncate(length)


def _write_tokens(segments: Iterable[Iterable[Piece]], store: Path) -> NDArray[np.int64]:
    lengths = []
    with (store / "tokens.bin").open("wb") as file, (store / "documents.bin").open("wb") as documents:
        for segment in segments:
            length = 0
            for tokens, digests in segment:
                file.write(tokens.data)
                documents.write(digests.data)
                length += len(tokens)
            lengths.append(length)
    table = segment_table(np.array(lengths, np.int64))
    (store / "segments.bin").write_bytes(table[:-1].astype("<i8").tobytes())
    return table


def cut_segments(
    shards: TokenShards, segment_tokens: int, room: int | None = None
) -> Iterator[Iterator[Piece]]:
    """Yield segments of closed documents; longer documents are split, and the first segment has its own `room`.

    A new segment starts where the next document does not fit, so the cuts depend on the documents alone.
    """
    pieces = _closed_documents(shards, segment_tokens)
    piece = next(pieces, None)

    def fill() -> Iterator[Piece]:
        nonlocal piece, room
        left, room = segment_tokens if room is None else room, None
        while piece is not None:
            array, ends, digests = piece
            whole = int(np.searchsorted(ends, left, side="right"))
            if whole == 0:
                return
            size = int(ends[whole - 1])
            yield Piece(array[:size], digests[:whole])
            left -= size
            rest = array[size:], ends[whole:] - size, digests[whole:]
            piece = rest if whole < len(ends) else next(pieces, None)

    while piece is not None:
        yield fill()


def _closed_documents(
    shards: TokenShards, segment_tokens: int
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint8]]]:
    """Yield each shard's tokens with a sentinel after every document, the ends of the documents, and their digests."""
    # Documents longer than a segment also get sentinels where they are split. Empty ones are skipped.
    for (tokens, offsets), digests in zip(shards.arrays(), shards.digests(), strict=True):
        if len(tokens) == 0:
            continue
        cuts = [
            np.append(np.arange(start + segment_tokens - 1, end, segment_tokens - 1), end)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            if end - start >= segment_tokens
        ]
        ends = np.unique(np.concatenate([offsets[1:], *cuts]))
        ends = ends[ends > 0]
        closed = np.insert(tokens, ends, sentinel(tokens.dtype))
        yield closed, ends + np.arange(1, len(ends) + 1), digests[np.searchsorted(offsets[1:], ends)]


def read_segments(store: Path) -> NDArray[np.int64]:
    """Return segments.bin, int64 [segments, 3]: first token, tokens, first key."""
    return np.fromfile(store / "segments.bin", "<i8").reshape(-1, 3)


def sort_segments(
    store: Path,
    pending: Sequence[int],
    vocab_size: int,
    workers: int,
    on_sorted: OnProgress,
    cluster: str | None = None,
) -> None:
    """Sort the pending segments: on a cluster, in this process if there is little to do, or else in separate ones."""
    lengths = read_segments(store)[:, 1]
    total = int(lengths.sum())
    done = total - int(lengths[pending].sum())
    on_sorted(done, total)
    workers = min(workers, len(pending))
    sort = partial(sort_segment, store, vocab_size)
    if cluster and total - done > SMALL_TOKENS:
        made = _sort_on_cluster(cluster, store, pending, vocab_size)
    elif workers <= 1 and total - done <= SMALL_TOKENS:
        made = map(sort, pending)
    else:
        made = map_apart(sort, pending, workers)
    try:
        for segment in made:
            done += int(lengths[segment])
            on_sorted(done, total)
    except (BrokenProcessPool, MemoryError):
        raise BuildError(
            "a sorting process was killed, perhaps because memory ran out: run this again, which resumes, "
            "with fewer processes or smaller segments",
            "workers",
            "segment_tokens",
        ) from None


def sort_segment(store: Path, vocab_size: int, segment: int) -> int:
    """Sort one segment of tokens.bin and write its part of the other arrays; return its number."""
    _write_sorted(store, vocab_size, segment, _sorted(store, vocab_size, segment))
    return segment


def _tokens_of(store: Path, vocab_size: int, segment: int) -> NDArray[Any]:
    start, length, _ = read_segments(store)[segment].tolist()
    dtype = token_dtype(vocab_size)
    return np.memmap(store / "tokens.bin", dtype, "r", start * dtype.itemsize, (length,))


def _sorted(store: Path, vocab_size: int, segment: int) -> tuple[NDArray[Any], ...]:
    """Return the suffixes, keys and first rows of a segment."""
    return index_segment(_tokens_of(store, vocab_size, segment), vocab_size)


def _write_sorted(store: Path, vocab_size: int, segment: int, arrays: Iterable[NDArray[Any]]) -> None:
    start, _, first_key = read_segments(store)[segment].tolist()
    places = start, first_key, segment * (vocab_size + 1)
    for name, array, place in zip(SORTED, arrays, places, strict=True):
        write_at(store / name, array, place)


def _sort_on_cluster(address: str, store: Path, pending: Sequence[int], vocab_size: int) -> Iterator[int]:
    """Sort segments on the nodes of a cluster, which write a file each; this process joins them."""
    parts = store.with_name(PARTS)
    parts.mkdir(exist_ok=True)
    size = sum((store / name).stat().st_size for name in SORTED)
    require_space(parts, 2 * size - sum(part.stat().st_size for part in parts.iterdir()))
    with Cluster(address, store.parent) as cluster:
        for segment, path in cluster.map(partial(sort_part, store, parts, vocab_size), pending):
            with path.open("rb") as file:
                _write_sorted(store, vocab_size, segment, (np.load(file) for _ in SORTED))
            yield segment
    remove(parts)


def sort_part(store: Path, parts: Path, vocab_size: int, segment: int) -> tuple[int, Path]:
    """Sort one segment of tokens.bin into a file of its own, unless that exists; return its number and the file."""
    # An interrupted build may have laid out other documents, or in another order.
    digest = hashlib.sha256(_tokens_of(store, vocab_size, segment).data).hexdigest()
    path = parts / f"sorted-{segment:05d}-{digest[:16]}"
    if not path.exists():
        arrays = _sorted(store, vocab_size, segment)
        with replacing(path) as filling, filling.open("wb") as file:
            for array in arrays:
                np.save(file, array)
    return segment, path
