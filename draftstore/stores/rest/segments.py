"""The arrays of a REST store: token shards laid out in segments, each sorted separately."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildError
from draftstore.processes import end_with_parent
from draftstore.search.suffix import index_segment, segment_table
from draftstore.storage.files import remove, write_at
from draftstore.storage.report import OnProgress
from draftstore.storage.staging import require_space
from draftstore.text.tokens import TokenShards, sentinel, token_dtype

SMALL_TOKENS = 1 << 22
"""Segments up to this size are sorted in about a second, too little for a separate process."""


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
    sizes = {
        "suffixes.bin": 4 * total,
        "keys.bin": 8 * keys,
        "first_rows.bin": 4 * (len(table) - 1) * (vocab_size + 1),
    }
    for name, length in sizes.items():
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
    store: Path, pending: Sequence[int], vocab_size: int, workers: int, on_sorted: OnProgress
) -> None:
    """Sort the pending segments: in this process if there is little to do, else in separate ones."""
    lengths = read_segments(store)[:, 1]
    total = int(lengths.sum())
    done = total - int(lengths[pending].sum())
    on_sorted(done, total)
    workers = min(workers, len(pending))
    sort = partial(sort_segment, store, vocab_size)
    here = workers <= 1 and total - done <= SMALL_TOKENS
    try:
        for segment in map(sort, pending) if here else _sort_apart(sort, pending, workers):
            done += int(lengths[segment])
            on_sorted(done, total)
    except (BrokenProcessPool, MemoryError):
        raise BuildError(
            "a sorting process was killed, perhaps because memory ran out: run this again, which resumes, "
            "with fewer processes or smaller segments",
            "workers",
            "segment_tokens",
        ) from None


def _sort_apart(sort: Callable[[int], int], pending: Sequence[int], workers: int) -> Iterator[int]:
    # Forking with threads (tokenizers) may deadlock.
    with ProcessPoolExecutor(workers, get_context("spawn"), _end_with_parent, (os.getpid(),)) as processes:
        futures = [processes.submit(sort, segment) for segment in pending]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # else they would finish their segments, minutes after Ctrl-C
            for process in list((processes._processes or {}).values()):
                process.kill()
            raise


def _end_with_parent(parent: int) -> None:
    """Let this process be killed with the build, and end without a traceback on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def sort_segment(store: Path, vocab_size: int, segment: int) -> int:
    """Sort one segment of tokens.bin and write its part of the other arrays; return its number."""
    start, length, first_key = read_segments(store)[segment].tolist()
    dtype = token_dtype(vocab_size)
    tokens = np.memmap(store / "tokens.bin", dtype, "r", start * dtype.itemsize, (length,))
    suffixes, keys, first_rows = index_segment(tokens, vocab_size)
    write_at(store / "suffixes.bin", suffixes, start)
    write_at(store / "keys.bin", keys, first_key)
    write_at(store / "first_rows.bin", first_rows, segment * (vocab_size + 1))
    return segment
