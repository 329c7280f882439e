"""Suffix sorting and suffix search: numba kernels over plain arrays, no files.

The corpus of a store is cut into *segments*. A segment is a run of documents, each closed by the sentinel (the
largest value of the token dtype), with a suffix array of its own. Suffixes are ordered token by token, the
sentinel above every token, the end of the segment below.

    tokens    5 7 5 7 9 #            # is the sentinel
    row       0 1 2 3 4 5
    suffixes  0 2 1 3 4 5            5 7 5.., 5 7 9.., 7 5.., 7 9.., 9 #, #
    rows that start with (5 7): [0, 2); what follows them is sorted too: 5, 9

Searching is bound by cache misses, not by comparisons: a suffix costs one miss in `suffixes` and one in `tokens`.
Two small tables avoid most of them: `first_rows` holds the rows of every first token, and `keys` holds the
leading tokens of every 16th suffix, packed into one integer, so that all but the last four steps of a binary
search stay inside a dense array (half a byte a token) and one cache line of `suffixes`.

Sorting is SA-IS: Nong, Zhang, Chan, "Two Efficient Algorithms for Linear Time Suffix Array Construction",
IEEE Transactions on Computers 60(10), 2011.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from draftstore.errors import TokenRangeError

MAX_SEGMENT_TOKENS = 2**31 - 2
"""Rows and positions of a segment are int32."""

KEY_STRIDE = 16
"""A key for every 16th row: 16 int32 rows are one cache line."""

KEY_TOTAL_BITS = 63
"""A key is a non-negative int64."""

_EMPTY = np.int32(-(2**31))

kernel = njit(cache=True, nogil=True, error_model="numpy")
leaf_kernel = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)
"""For kernels that allocate nothing: without reference counts, which cost more than the work in hot loops."""


class SuffixIndex(NamedTuple):
    """The arrays of all segments of a store, ready for the kernels; all are read-only views.

    Attributes:
        tokens: uint16 or uint32 [total], the segments one after the other.
        suffixes: int32 [total], positions inside their segment in suffix order.
        keys: int64 [sum of ceil(segment / 16)], the leading tokens of every 16th suffix.
        first_rows: int32 [segments, vocab_size + 1], first row of every first token; the last entry is the row
            where the sentinels start.
        segments: int64 [segments, 3], for each its first token, its length and its first key.
        vocab_size: token ids lie in [0, vocab_size).
        key_bits: bits of a key for each token.
        key_tokens: tokens in a key.
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
    """Return (bits a token, tokens a key) for a vocabulary; the sentinel counts as one more token."""
    bits = max(int(vocab_size).bit_length(), 1)
    return bits, KEY_TOTAL_BITS // bits


# -- sorting ---------------------------------------------------------------------------------------------------


def suffix_array(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int32]:
    """Sort all suffixes of one segment.

    Args:
        tokens: integer [n]; ids below `vocab_size`, or the sentinel.
        vocab_size: number of distinct token ids.

    Returns:
        int32 [n], the start of every suffix in ascending order. Extra memory beside it: below 3 bytes a token.

    Raises:
        TokenRangeError: the segment is longer than int32 rows can count.
    """
    if len(tokens) > MAX_SEGMENT_TOKENS:
        raise TokenRangeError(f"a segment holds at most {MAX_SEGMENT_TOKENS:,} tokens, found {len(tokens):,}")
    suffixes = np.empty(len(tokens), np.int32)
    _sort(read_only(tokens), suffixes, vocab_size + 1)
    return suffixes


def _sort(text: NDArray[Any], suffixes: NDArray[np.int32], symbols: int) -> None:
    """Sort `text` into `suffixes`; every intermediate result lives inside `suffixes`."""
    if len(text) < 2:
        suffixes[:] = 0
        return
    bounds = _bucket_bounds(text, symbols)
    count = _sort_lms_substrings(text, suffixes, bounds)
    if count > 1:
        names = _name_lms_substrings(text, suffixes, count)
        if names < count:
            reduced = suffixes[len(text) - count :]
            _sort(read_only(reduced), suffixes[:count], names)
            _restore_lms_positions(text, suffixes, count)
    _induce_from_sorted_lms(text, suffixes, bounds, count)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: kernels compile once for mapped and in-memory arrays alike."""
    view = array.view(np.ndarray)
    view.setflags(write=False)
    return view


@kernel
def _bucket_bounds(text, symbols):  # type: ignore[no-untyped-def]
    """Return int32 [symbols + 1]: the first row of each first symbol; the sentinel is the last symbol."""
    bounds = np.zeros(symbols + 1, np.int32)
    for i in range(len(text)):
        bounds[min(np.int64(text[i]), symbols - 1) + 1] += 1
    for c in range(symbols):
        bounds[c + 1] += bounds[c]
    return bounds


@kernel
def _sort_lms_substrings(text, suffixes, bounds):  # type: ignore[no-untyped-def]
    """Leave the LMS positions in `suffixes[:count]`, ordered by their LMS substrings; return their count."""
    symbols = len(bounds) - 1
    n = len(text)
    suffixes[:] = _EMPTY
    ends = bounds[1:].copy()
    is_s = False
    for i in range(n - 2, -1, -1):
        a, b = text[i], text[i + 1]
        if a > b and is_s:
            c = min(np.int64(b), symbols - 1)
            ends[c] -= 1
            suffixes[ends[c]] = i + 1
        is_s = a < b or (a == b and is_s)
    _induce_l(text, suffixes, bounds)
    _induce_s(text, suffixes, bounds, True)
    count = 0
    for i in range(n):
        if suffixes[i] < 0:
            suffixes[count] = ~suffixes[i]
            count += 1
    return count


@kernel
def _induce_l(text, suffixes, bounds):  # type: ignore[no-untyped-def]
    """Place the L-type suffixes by one scan from the left, from the LMS suffixes already in place."""
    symbols = len(bounds) - 1
    n = len(text)
    starts = bounds[:-1].copy()
    c = min(np.int64(text[n - 1]), symbols - 1)
    suffixes[starts[c]] = n - 1
    starts[c] += 1
    for i in range(n):
        v = suffixes[i]
        if v > 0 and text[v - 1] >= text[v]:
            c = min(np.int64(text[v - 1]), symbols - 1)
            suffixes[starts[c]] = v - 1
            starts[c] += 1


@kernel
def _induce_s(text, suffixes, bounds, mark_lms):  # type: ignore[no-untyped-def]
    """Place the S-type suffixes by one scan from the right; marked LMS positions are stored as complements.

    Whether the suffix at row i is itself S-type shows from i: it then lies in the part of its bucket that this
    scan has filled. So no type array is needed.
    """
    symbols = len(bounds) - 1
    ends = bounds[1:].copy()
    for i in range(len(text) - 1, -1, -1):
        v = suffixes[i]
        if v <= 0:
            continue
        before, first = text[v - 1], text[v]
        if before > first:
            continue
        c = min(np.int64(before), symbols - 1)
        if before == first and i < ends[c]:
            continue
        ends[c] -= 1
        if mark_lms and v > 1 and text[v - 2] > before:
            suffixes[ends[c]] = ~(v - 1)
        else:
            suffixes[ends[c]] = v - 1


@kernel
def _name_lms_substrings(text, suffixes, count):  # type: ignore[no-untyped-def]
    """Replace each LMS substring by its rank; return the number of ranks.

    With fewer ranks than substrings, `suffixes[n - count:]` is the reduced text. LMS positions are at least two
    apart, so `position // 2` addresses a free cell above `count`: first for lengths, then for ranks.
    """
    n = len(text)
    suffixes[count:] = -1
    is_s = False
    following = n
    for i in range(n - 2, -1, -1):
        if text[i] > text[i + 1] and is_s:
            suffixes[count + (i + 1) // 2] = following - i
            following = i + 1
        is_s = text[i] < text[i + 1] or (text[i] == text[i + 1] and is_s)
    names = 0
    previous = n
    previous_length = 0
    for row in range(count):
        v = suffixes[row]
        length = suffixes[count + v // 2]
        same = length == previous_length and v + length <= n and previous + length <= n
        if same:
            for j in range(length):
                if text[v + j] != text[previous + j]:
                    same = False
                    break
        if not same:
            names += 1
        suffixes[count + v // 2] = names - 1
        previous, previous_length = v, length
    if names < count:
        write = n - 1
        for i in range(count + n // 2 if count + n // 2 < n else n - 1, count - 1, -1):
            if suffixes[i] >= 0:
                suffixes[write] = suffixes[i]
                write -= 1
    return names


@kernel
def _restore_lms_positions(text, suffixes, count):  # type: ignore[no-untyped-def]
    """Turn the order of the reduced text's suffixes into the order of the LMS positions they stand for."""
    n = len(text)
    write = n - 1
    is_s = False
    for i in range(n - 2, -1, -1):
        if text[i] > text[i + 1] and is_s:
            suffixes[write] = i + 1
            write -= 1
        is_s = text[i] < text[i + 1] or (text[i] == text[i + 1] and is_s)
    for row in range(count):
        suffixes[row] = suffixes[n - count + suffixes[row]]


@kernel
def _induce_from_sorted_lms(text, suffixes, bounds, count):  # type: ignore[no-untyped-def]
    """Order all suffixes from the sorted LMS suffixes in `suffixes[:count]`."""
    symbols = len(bounds) - 1
    suffixes[count:] = _EMPTY
    ends = bounds[1:].copy()
    for row in range(count - 1, -1, -1):
        v = suffixes[row]
        suffixes[row] = _EMPTY
        c = min(np.int64(text[v]), symbols - 1)
        ends[c] -= 1
        suffixes[ends[c]] = v
    _induce_l(text, suffixes, bounds)
    _induce_s(text, suffixes, bounds, False)


# -- tables ----------------------------------------------------------------------------------------------------


@kernel
def first_row_table(tokens, vocab_size):  # type: ignore[no-untyped-def]
    """Return int32 [vocab_size + 1]: the first row of every first token; last, where the sentinels start."""
    return _bucket_bounds(tokens, vocab_size + 1)[: vocab_size + 1]


@kernel
def key_table(tokens, suffixes, vocab_size, key_bits, key_tokens):  # type: ignore[no-untyped-def]
    """Return int64 [ceil(n / 16)]: the packed leading tokens of every 16th suffix of one segment."""
    n = len(tokens)
    keys = np.empty((n + KEY_STRIDE - 1) // KEY_STRIDE, np.int64)
    for j in range(len(keys)):
        keys[j] = _suffix_key(tokens, np.int64(0), n, np.int64(suffixes[j * KEY_STRIDE]), vocab_size, key_bits, key_tokens)
    return keys


@leaf_kernel
def _suffix_key(tokens, base, n, position, vocab_size, key_bits, count):  # type: ignore[no-untyped-def]
    """Pack the `count` tokens from `position` on; the sentinel counts as `vocab_size`, past the end is 0.

    Only a sentinel stands before the end of a segment and no pattern holds one, so the padding never matches.
    """
    key = np.int64(0)
    for j in range(count):
        c = np.int64(0)
        if position + j < n:
            c = min(np.int64(tokens[base + position + j]), np.int64(vocab_size))
        key = (key << key_bits) | c
    return key


# -- search ----------------------------------------------------------------------------------------------------


@leaf_kernel
def find_rows(index, segment, lo, hi, known, pattern, start, stop):  # type: ignore[no-untyped-def]
    """Return the rows [lo, hi) of a segment whose suffixes start with `pattern[start:stop]`.

    Args:
        index: a SuffixIndex.
        segment: which segment.
        lo: first row to consider; all rows considered start with the first `known` tokens of the pattern.
        hi: row after the last.
        known: tokens of the pattern that need no check.
        pattern: int64 [at least stop].
        start: first token of the pattern.
        stop: token after its last.
    """
    base, n, first_key = index.segments[segment, 0], index.segments[segment, 1], index.segments[segment, 2]
    length = stop - start
    packed = min(length, index.key_tokens)
    if known < packed:
        low_key = np.int64(0)
        for j in range(packed):
            low_key = (low_key << index.key_bits) | pattern[start + j]
        shift = index.key_bits * (index.key_tokens - packed)
        high_key = (low_key + 1) << shift
        lo, hi = _find_keys(index, base, n, first_key, lo, hi, low_key << shift, high_key)
        known = packed
    if known < length and lo < hi:
        if hi - lo > KEY_STRIDE:
            lo = _lower_row(index, base, n, lo, hi, known, pattern, start, length, False)
            hi = _lower_row(index, base, n, lo, hi, known, pattern, start, length, True)
        else:
            lo, hi = _scan_rows(index, base, n, lo, hi, known, pattern, start, length)
    return lo, hi


@leaf_kernel
def _find_keys(index, base, n, first_key, lo, hi, low_key, high_key):  # type: ignore[no-untyped-def]
    """Return the rows in [lo, hi) with keys from `low_key` to below `high_key`."""
    block = _lower_block(index, first_key, lo, hi, low_key)
    first, end = max(lo, (block - 1) * KEY_STRIDE), min(hi, block * KEY_STRIDE)
    below_low, below_high = _count_below(index, base, n, first, end, low_key, high_key)
    if first + below_high < end or end == hi:
        return first + below_low, first + below_high
    lo = first + below_low
    step = 1  # most ranges are short: look for their end in growing steps
    while block * KEY_STRIDE < hi and index.keys[first_key + block] < high_key:
        first, block, step = block * KEY_STRIDE, block + step, step * 2
    block = _lower_block(index, first_key, first, min(hi, block * KEY_STRIDE), high_key)
    first, end = max(first, (block - 1) * KEY_STRIDE), min(hi, block * KEY_STRIDE)
    return lo, first + _count_below(index, base, n, first, end, low_key, high_key)[1]


@leaf_kernel
def _lower_block(index, first_key, lo, hi, key):  # type: ignore[no-untyped-def]
    """Return the first block that starts in [lo, hi) with at least `key`, else the one after the last."""
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
def _count_below(index, base, n, lo, hi, low_key, high_key):  # type: ignore[no-untyped-def]
    """Count the rows of one block below two keys.

    All of them are read, without a branch, rather than searched: cache misses that do not wait for each other cost
    little more than one.
    """
    below_low = below_high = 0
    for row in range(lo, hi):
        position = np.int64(index.suffixes[base + row])
        key = _suffix_key(index.tokens, base, n, position, index.vocab_size, index.key_bits, index.key_tokens)
        below_low += key < low_key
        below_high += key < high_key
    return below_low, below_high


@leaf_kernel
def _scan_rows(index, base, n, lo, hi, known, pattern, start, length):  # type: ignore[no-untyped-def]
    """Return the rows in the short range [lo, hi) that match the pattern."""
    first, matches = lo, 0
    for row in range(lo, hi):
        position = np.int64(index.suffixes[base + row])
        order = 0
        for j in range(known, length):
            token = np.int64(-1)
            if position + j < n:
                token = np.int64(index.tokens[base + position + j])
            if token != pattern[start + j]:
                order = -1 if token < pattern[start + j] else 1
                break
        first += order < 0
        matches += order == 0
    return first, first + matches


@leaf_kernel
def _lower_row(index, base, n, lo, hi, known, pattern, start, length, after):  # type: ignore[no-untyped-def]
    """Return the first row in [lo, hi) not below the pattern, or with `after` the first row above all its matches."""
    while lo < hi:
        middle = (lo + hi) // 2
        position = np.int64(index.suffixes[base + middle])
        below = after
        for j in range(known, length):
            if position + j >= n:
                below = True
                break
            token = np.int64(index.tokens[base + position + j])
            wanted = pattern[start + j]
            if token != wanted:
                below = token < wanted
                break
        if below:
            lo = middle + 1
        else:
            hi = middle
    return lo
