"""Suffix search: numba kernels over plain arrays, no files.

The corpus of a store is cut into *segments*. A segment is a run of documents, each ended by the sentinel (the largest
value of the token dtype), with its own suffix array. Suffixes are ordered token by token, the sentinel above every
token, the end of the segment below.

    tokens    5 7 5 7 9 #            # is the sentinel
    row       0 1 2 3 4 5
    suffixes  0 2 1 3 4 5            5 7 5.., 5 7 9.., 7 5.., 7 9.., 9 #, #
    rows that start with (5 7): [0, 2); the tokens that follow are sorted too: 5, 9

Searching is bound by cache misses, not by comparisons: a suffix costs one miss in `suffixes` and one in `tokens`. Two
small tables avoid most of them: `first_rows` has the rows of every first token, and `keys` has the leading tokens of
every 16th suffix, packed into one integer, so that all but the last four steps of a binary search stay in a dense array
(half a byte per token) and one cache line of `suffixes`.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel, read_only
from draftstore.search.sorting import bucket_bounds, suffix_array

KEY_STRIDE = 16
"""A key for every 16th row: 16 int32 rows are one cache line."""

KEY_TOTAL_BITS = 63
"""A key is a non-negative int64."""


class SuffixIndex(NamedTuple):
    """The arrays of all segments of a store for the kernels; all are read-only views.

    Attributes:
        tokens: uint16 or uint32 [total], the concatenated segments, of ids below `vocab_size`.
        suffixes: int32 [total], positions relative to their segment, in suffix order.
        keys: int64 [sum of ceil(segment / 16)], the leading `key_tokens` tokens of every 16th suffix.
        first_rows: int32 [segments, vocab_size + 1], first row of every first token; last, of the sentinels.
        segments: int64 [segments, 3], first token, length and first key of each.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[np.int32]
    keys: NDArray[np.int64]
    first_rows: NDArray[np.int32]
    segments: NDArray[np.int64]
    vocab_size: int
    key_bits: int
    key_tokens: int


def key_layout(vocab_size: int) -> tuple[int, int]:
    """Return (bits per token, tokens per key) for a vocabulary; the sentinel counts as one more token."""
    bits = max(int(vocab_size).bit_length(), 1)
    return bits, KEY_TOTAL_BITS // bits


def segment_table(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lay out segments of the given lengths, int64 [segments], consecutively.

    Returns int64 [segments + 1, 3], first token, tokens and first key of each; the last row is the end.
    """
    sizes = np.append(lengths, 0)
    key_counts = -(-sizes // KEY_STRIDE)
    return np.stack([np.cumsum(sizes) - sizes, sizes, np.cumsum(key_counts) - key_counts], axis=1)


def index_segment(
    tokens: NDArray[Any], vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Sort one segment and build its tables: suffixes, keys and first rows, as in SuffixIndex; see `suffix_array`."""
    tokens = read_only(tokens)
    suffixes = suffix_array(tokens, vocab_size)
    keys = key_table(tokens, read_only(suffixes), vocab_size, *key_layout(vocab_size))
    return suffixes, keys, first_row_table(tokens, vocab_size)


@kernel
def first_row_table(tokens, vocab_size):
    """Return int32 [vocab_size + 1]: the first row of every first token; last, of the sentinels."""
    return bucket_bounds(tokens, vocab_size + 1)[: vocab_size + 1]


@kernel
def key_table(tokens, suffixes, vocab_size, key_bits, key_tokens):
    """Return int64 [ceil(n / 16)]: the packed leading tokens of every 16th suffix of one segment."""
    n = len(tokens)
    keys = np.empty((n + KEY_STRIDE - 1) // KEY_STRIDE, np.int64)
    for j in range(len(keys)):
        keys[j] = _suffix_key(
            tokens, np.int64(0), n, np.int64(suffixes[j * KEY_STRIDE]), vocab_size, key_bits, key_tokens
        )
    return keys


@leaf_kernel
def token_at(tokens, base, n, position):
    """Return the token at a position of a segment, -1 outside: a damaged store must not crash the process."""
    if position < 0 or position >= n:
        return np.int64(-1)
    return np.int64(tokens[base + position])


@leaf_kernel
def _suffix_key(tokens, base, n, position, vocab_size, key_bits, count):
    """Pack `count` tokens from `position` on; the sentinel counts as `vocab_size`, positions past the end as 0."""
    key = np.int64(0)
    for j in range(count):
        token = token_at(tokens, base, n, position + j)
        key = (key << key_bits) | max(np.int64(0), min(token, np.int64(vocab_size)))
    return key


@leaf_kernel
def find_rows(index, segment, lo, hi, pattern, start, stop):
    """Return the rows that start with int64 `pattern[start:stop]`, among the rows [lo, hi) of its first token."""
    base, n, first_key = index.segments[segment, 0], index.segments[segment, 1], index.segments[segment, 2]
    length = stop - start
    known = min(length, index.key_tokens)
    if known > 1:
        low_key = np.int64(0)
        for j in range(known):
            low_key = (low_key << index.key_bits) | pattern[start + j]
        shift = index.key_bits * (index.key_tokens - known)
        high_key = (low_key + 1) << shift
        lo, hi = _find_keys(index, base, n, first_key, lo, hi, low_key << shift, high_key)
    if known < length and lo < hi:
        if hi - lo > KEY_STRIDE:
            lo = _lower_row(index, base, n, lo, hi, known, pattern, start, length, False)
            hi = _lower_row(index, base, n, lo, hi, known, pattern, start, length, True)
        else:
            lo, hi = _scan_rows(index, base, n, lo, hi, known, pattern, start, length)
    return lo, hi


@leaf_kernel
def _find_keys(index, base, n, first_key, lo, hi, low_key, high_key):
    """Return the rows in [lo, hi) with keys from `low_key` to below `high_key`."""
    block = _lower_block(index, first_key, lo, hi, low_key)
    first, end = max(lo, (block - 1) * KEY_STRIDE), min(hi, block * KEY_STRIDE)
    below_low, below_high = _count_below(index, base, n, first, end, low_key, high_key)
    if first + below_high < end or end == hi:
        return first + below_low, first + below_high
    lo = first + below_low
    step = 1  # most ranges are short: gallop to their end
    while block * KEY_STRIDE < hi and index.keys[first_key + block] < high_key:
        first, block, step = block * KEY_STRIDE, block + step, step * 2
    block = _lower_block(index, first_key, first, min(hi, block * KEY_STRIDE), high_key)
    first, end = max(first, (block - 1) * KEY_STRIDE), min(hi, block * KEY_STRIDE)
    return lo, first + _count_below(index, base, n, first, end, low_key, high_key)[1]


@leaf_kernel
def _lower_block(index, first_key, lo, hi, key):
    """Return the first block starting in [lo, hi) with a key of at least `key`, else the one after the last."""
    a = (lo + KEY_STRIDE - 1) // KEY_STRIDE
    b = (hi + KEY_STRIDE - 1) // KEY_STRIDE
    while a < b:
        middle = (a + b) // 2
        if index.keys[first_key + middle] < key:
            a = middle + 1
        else:
            b = middle
    return a


@leaf_kernel
def _count_below(index, base, n, lo, hi, low_key, high_key):
    """Count the rows of one block below two keys, without branches, so that their cache misses overlap."""
    below_low = below_high = 0
    for row in range(lo, hi):
        position = np.int64(index.suffixes[base + row])
        key = _suffix_key(index.tokens, base, n, position, index.vocab_size, index.key_bits, index.key_tokens)
        below_low += key < low_key
        below_high += key < high_key
    return below_low, below_high


@leaf_kernel
def _scan_rows(index, base, n, lo, hi, known, pattern, start, length):
    """Return the rows in the short range [lo, hi) that match the pattern."""
    first, matches = lo, 0
    for row in range(lo, hi):
        position = np.int64(index.suffixes[base + row])
        order = 0
        for j in range(known, length):
            token = token_at(index.tokens, base, n, position + j)
            if token != pattern[start + j]:
                order = -1 if token < pattern[start + j] else 1
                break
        first += order < 0
        matches += order == 0
    return first, first + matches


@leaf_kernel
def _lower_row(index, base, n, lo, hi, known, pattern, start, length, after):
    """Return the first row in [lo, hi) not below the pattern, or with `after` the first row above all matches."""
    while lo < hi:
        middle = (lo + hi) // 2
        position = np.int64(index.suffixes[base + middle])
        below = after
        for j in range(known, length):
            token = token_at(index.tokens, base, n, position + j)
            wanted = pattern[start + j]
            if token != wanted:
                below = token < wanted
                break
        if below:
            lo = middle + 1
        else:
            hi = middle
    return lo
