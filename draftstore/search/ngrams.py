"""Exact n-gram counts from the suffix arrays of a store.

In suffix order, all occurrences of an n-gram are adjacent rows: if a suffix shares its first n tokens with the one
before, the n-gram has one more occurrence; otherwise a new n-gram starts. N-grams come out sorted.

    row   suffix       shared   of n = 1    of n = 2
    0     5 7 5 7 9    0        5     x 1   5 7   x 1
    1     5 7 9        2        5     x 2   5 7   x 2
    2     7 5 7 9      0        7     x 1   7 5   x 1
    3     7 9          1        7     x 2   7 9   x 1
    4     9            0        9     x 1

An n-gram never spans documents. Segments are counted separately and merged, one range of first tokens at a time, so
that memory is bounded for stores of any size.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import CORES, kernel
from draftstore.search.suffix import SuffixIndex

MAX_N = 8
"""Maximum tokens of a counted n-gram."""
PART_ROWS = 1 << 22
"""Rows counted at a time, unless one first token has more."""


class NgramTable(NamedTuple):
    """N-grams of one length, uint16 or uint32 [k, n], in ascending order, with the occurrences of each."""

    tokens: NDArray[Any]
    counts: NDArray[np.int64]


def count_ngrams(
    index: SuffixIndex,
    max_n: int,
    *,
    part_rows: int = PART_ROWS,
    workers: int | None = None,
    on_rows: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[tuple[NgramTable, ...]]:
    """Count all n-grams of 1 to `max_n` tokens.

    For every range of first tokens, ascending, yields one table for each n from 1. `part_rows` are counted at a time,
    which bounds memory: each takes some 60 bytes at n = 5. `on_rows` receives, after each part, the rows done and the
    total.
    """
    threads, done = workers or CORES, 0
    waiting: deque[tuple[int, Future[tuple[NgramTable, ...]]]] = deque()

    def next_part() -> Iterator[tuple[NgramTable, ...]]:
        nonlocal done
        rows, future = waiting.popleft()
        yield future.result()
        done += rows
        on_rows(done, len(index.suffixes))

    with ThreadPoolExecutor(threads) as pool:
        for first, stop in token_ranges(index, part_rows):
            rows = int((index.first_rows[:, stop] - index.first_rows[:, first]).sum())
            waiting.append((rows, pool.submit(_count_part, index, first, stop, max_n)))
            if len(waiting) > threads:
                yield from next_part()
        while waiting:
            yield from next_part()


def _count_part(index: SuffixIndex, first: int, stop: int, max_n: int) -> tuple[NgramTable, ...]:
    """Count the n-grams that start with a token in [first, stop), over all segments."""
    parts = []
    for segment, (base, length, _) in enumerate(index.segments.tolist()):
        lo, hi = index.first_rows[segment, [first, stop]].tolist()
        tokens = index.tokens[base : base + length]
        flat, counts, sizes = count_rows(
            tokens, index.suffixes[base + lo : base + hi], index.vocab_size, max_n
        )
        parts.append([_table(flat, counts, sizes, n) for n in range(1, max_n + 1)])
    return tuple(_merge(tables) for tables in zip(*parts, strict=True))


def _table(flat: NDArray[Any], counts: NDArray[np.int64], sizes: NDArray[np.int64], n: int) -> NgramTable:
    begin, size = counts.shape[1] * (n * (n - 1) // 2), int(sizes[n - 1])
    return NgramTable(flat[begin : begin + size * n].reshape(size, n), counts[n - 1, :size])


def token_ranges(index: SuffixIndex, part_rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [first, stop) of first tokens with at most `part_rows` rows, or of a single token."""
    ends = index.first_rows.sum(axis=0, dtype=np.int64)
    first = 0
    while first < index.vocab_size:
        stop = int(np.searchsorted(ends, ends[first] + part_rows, "right")) - 1
        stop = min(max(stop, first + 1), index.vocab_size)
        yield first, stop
        first = stop


def _merge(tables: Sequence[NgramTable]) -> NgramTable:
    return reduce(lambda left, right: NgramTable(*add_tables(*left, *right)), tables)


@kernel
def count_rows(tokens, positions, vocab_size, max_n):
    """Count the n-grams of some ascending suffixes of a segment, int32 [rows], all lengths in one pass.

    Returns the n-grams, flat: those of length n start at rows * n * (n - 1) / 2, n tokens each; their counts, int64
    [max_n, rows]; the number of n-grams of each length, int64 [max_n].
    """
    rows = len(positions)
    flat = np.empty(rows * (max_n * (max_n + 1) // 2), tokens.dtype)
    counts = np.empty((max_n, rows), np.int64)
    sizes = np.zeros(max_n, np.int64)
    # The leading tokens of the previous suffix; -1 after its document's end.
    before = np.full(max_n, -1, np.int64)
    for row in range(rows):
        position = np.int64(positions[row])
        most = min(max_n, len(tokens) - position) if position >= 0 else 0
        j = 0
        while j < most and tokens[position + j] == before[j]:
            counts[j, sizes[j] - 1] += 1
            j += 1
        while j < most and tokens[position + j] < vocab_size:
            before[j] = tokens[position + j]
            place = rows * (j * (j + 1) // 2) + sizes[j] * (j + 1)
            flat[place : place + j + 1] = before[: j + 1]
            counts[j, sizes[j]] = 1
            sizes[j] += 1
            j += 1
        before[j:] = -1
    return flat, counts, sizes


@kernel
def add_tables(left, left_counts, right, right_counts):
    """Merge two ascending tables of n-grams [k, n] with their counts [k]; equal n-grams become one."""
    n = left.shape[1]
    ngrams = np.empty((len(left) + len(right), n), left.dtype)
    counts = np.zeros(len(ngrams), np.int64)
    i = j = size = 0
    while i < len(left) or j < len(right):
        order = 0  # comparison of the left n-gram with the right one
        if i == len(left) or j == len(right):
            order = 1 if i == len(left) else -1
        else:
            k = 0
            while k < n and left[i, k] == right[j, k]:
                k += 1
            if k < n:
                order = -1 if left[i, k] < right[j, k] else 1
        if order <= 0:
            ngrams[size] = left[i]
            counts[size] += left_counts[i]
            i += 1
        if order >= 0:
            ngrams[size] = right[j]
            counts[size] += right_counts[j]
            j += 1
        size += 1
    return ngrams[:size], counts[:size]
