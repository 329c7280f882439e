"""Merging sorted suffixes: add new documents to a suffix array without sorting the rest again.

    old rows    5 7.., 5 9.., 7 #, 9 #        those of removed documents are dropped
    new rows    5 8.., 9 2..                  sorted separately
    merged      5 7.., 5 8.., 5 9.., 7 #, 9 #, 9 2..

Each new suffix is looked up among the old ones by galloping from the previous one; the rows in between are copied.
Suffixes are compared up to the end of their documents, for at most `DEEPEST` tokens: drafts never look further. Equal
ones stay in order, old before new.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import StoreError
from draftstore.jit import as_input, kernel, leaf_kernel, read_only
from draftstore.search.expand import MAX_MATCH
from draftstore.search.suffix import first_row_table, index_segment, key_layout, key_table, token_at
from draftstore.trees.frontier import MAX_DEPTH

DEEPEST = MAX_MATCH + MAX_DEPTH
"""Tokens by which suffixes are ordered: the maximum of a context and a path together."""

BLOCK_BITS = 12


class Rows(NamedTuple):
    """Sorted suffixes of a text: tokens uint16 or uint32 [n], suffixes int32 [n], first rows as in `SuffixIndex`."""

    tokens: NDArray[Any]
    suffixes: NDArray[np.int32]
    first_rows: NDArray[np.int32]


class Gaps(NamedTuple):
    """The k removed stretches of a text, ascending.

    Attributes:
        lost: int64 [k + 1], tokens removed before each gap; last, in total.
        blocks: int64 [ceil(n / 4,096)], gaps that start before each block of tokens: where a search starts.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    lost: NDArray[np.int64]
    blocks: NDArray[np.int64]


def merge_segment(
    old: Rows, gaps: NDArray[np.int64], tokens: NDArray[Any], suffixes: NDArray[np.int32], threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Fill the suffix array of a segment that holds the remaining documents of an old one, followed by new documents.

    `gaps` int64 [k, 2] are start and end of the removed tokens, ascending and disjoint, `tokens` uint16 or uint32 [n]
    the segment, `suffixes` int32 [n] the array to fill. Returns keys and first rows as in `SuffixIndex`.

    Raises StoreError if the old segment is damaged, TokenRangeError if the new documents have ids outside the
    vocabulary.
    """
    vocab_size, table = len(old.first_rows) - 1, _gap_table(gaps, len(old.tokens))
    remaining = len(old.tokens) - int(table.lost[-1])
    new_suffixes, _, new_first_rows = index_segment(tokens[remaining:], vocab_size)
    new = Rows(tokens[remaining:], new_suffixes, new_first_rows)
    merged = Rows(tokens, suffixes, first_row_table(read_only(tokens), vocab_size))
    cuts = _even_cuts(merged, threads)

    def merge(first: int, stop: int) -> None:
        """Merge the suffixes that start with a token of [first, stop)."""
        begin, end = _rows_of(merged, first, stop)
        size = merge_rows(
            read_only(old.tokens),
            read_only(old.suffixes[slice(*_rows_of(old, first, stop))]),
            table,
            read_only(new.tokens),
            read_only(new.suffixes[slice(*_rows_of(new, first, stop))]),
            remaining,
            vocab_size,
            suffixes[begin:end],
        )
        if size != end - begin:
            raise StoreError("the suffix array of a segment does not match its tokens: build the store again")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(merge, cuts[:-1], cuts[1:]))
    keys = key_table(read_only(tokens), read_only(suffixes), vocab_size, *key_layout(vocab_size))
    return keys, merged.first_rows


def _gap_table(gaps: NDArray[np.int64], size: int) -> Gaps:
    starts, ends = gaps.T
    blocks = np.searchsorted(starts, np.arange(0, size, 1 << BLOCK_BITS))
    lost = np.concatenate([np.zeros(1, np.int64), np.cumsum(ends - starts)])
    return Gaps(*(as_input(array, np.int64) for array in (starts, ends, lost, blocks)))


def _even_cuts(rows: Rows, parts: int) -> list[int]:
    """Return first tokens that cut the rows into about equal parts, from 0 to the one after the sentinel."""
    aims = len(rows.suffixes) * np.arange(1, parts) // parts
    cuts = np.searchsorted(rows.first_rows, aims).tolist()
    return [0, *cuts, len(rows.first_rows)]


def _rows_of(rows: Rows, first: int, stop: int) -> tuple[int, int]:
    """Return the rows whose first token is in [first, stop); the sentinel counts as the vocabulary's size."""
    bounds = [
        int(rows.first_rows[token]) if token < len(rows.first_rows) else len(rows.suffixes)
        for token in (first, stop)
    ]
    return bounds[0], bounds[1]


@kernel
def merge_rows(tokens, suffixes, gaps, new_tokens, new_suffixes, shift, vocab_size, merged):
    """Merge rows of an old and a new text with the same first tokens; return their number.

    The new text starts at `shift`. Rows beyond the end of `merged` are counted, but not written.
    """
    row, size = np.int64(0), np.int64(0)
    for i in range(len(new_suffixes)):
        position = np.int64(new_suffixes[i])
        after = _rows_before(tokens, suffixes, row, new_tokens, position, vocab_size)
        size = _copy_rows(suffixes, row, after, gaps, merged, size)
        if size < len(merged):
            merged[size] = position + shift
        size += 1
        row = after
    return _copy_rows(suffixes, row, np.int64(len(suffixes)), gaps, merged, size)


@leaf_kernel
def _rows_before(tokens, suffixes, row, new_tokens, position, vocab_size):
    """Return the first row from `row` on whose suffix is above a new one."""
    step, low, high = np.int64(1), row, np.int64(len(suffixes))
    while low < high:  # gallop: most new suffixes are close to the previous one
        probe = min(low + step, high) - 1
        if _is_above(tokens, np.int64(suffixes[probe]), new_tokens, position, vocab_size):
            high = probe
            break
        low, step = probe + 1, step * 2
    while low < high:
        middle = (low + high) // 2
        if _is_above(tokens, np.int64(suffixes[middle]), new_tokens, position, vocab_size):
            high = middle
        else:
            low = middle + 1
    return low


@leaf_kernel
def _is_above(tokens, position, new_tokens, new_position, vocab_size):
    above = False
    for i in range(DEEPEST):
        old = token_at(tokens, 0, len(tokens), position + i)
        new = token_at(new_tokens, 0, len(new_tokens), new_position + i)
        if old != new or old < 0 or old >= vocab_size:
            above = old > new
            break
    return above


@leaf_kernel
def _copy_rows(suffixes, row, stop, gaps, merged, size):
    """Append the rows [row, stop) of remaining documents at their new positions; return the new size."""
    for i in range(row, stop):
        position = np.int64(suffixes[i])
        if position < 0 or position >> BLOCK_BITS >= len(gaps.blocks):
            continue  # a damaged store must not crash the process
        gap = gaps.blocks[position >> BLOCK_BITS]
        while gap < len(gaps.starts) and gaps.starts[gap] <= position:
            gap += 1
        if gap > 0 and position < gaps.ends[gap - 1]:
            continue
        if size < len(merged):
            merged[size] = position - gaps.lost[gap]
        size += 1
    return size
