"""Suffix sorting in linear time.

SA-IS: "Two Efficient Algorithms for Linear Time Suffix Array Construction", IEEE Transactions on
Computers 60(10), 2011. A suffix is S-type if it is smaller than the next suffix, else L-type; an LMS suffix is an
S-type one right after an L-type one. The LMS suffixes are sorted first (by recursion if two of their substrings are
equal); two scans then induce the order of all others. Memory: the suffix array itself and two integers per symbol.

Suffixes are ordered token by token, the sentinel above every token, the end of the segment below.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import TokenRangeError
from draftstore.jit import kernel, read_only

MAX_SEGMENT_TOKENS = 2**31 - 2
"""Rows and positions of a segment are int32."""

_EMPTY = np.int32(-(2**31))


def suffix_array(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int32]:
    """Return int32 [n], the start of every suffix of a segment in ascending order."""
    if len(tokens) > MAX_SEGMENT_TOKENS:
        raise TokenRangeError(f"a segment holds at most {MAX_SEGMENT_TOKENS:,} tokens, found {len(tokens):,}")
    foreign = _find_foreign(read_only(tokens), vocab_size, np.iinfo(tokens.dtype).max)
    if foreign >= 0:
        raise TokenRangeError(
            f"position {foreign:,} of a segment holds id {tokens[foreign]:,}, expected ids below {vocab_size:,}"
        )
    suffixes = np.empty(len(tokens), np.int32)
    _sort(read_only(tokens), suffixes, vocab_size + 1)
    return suffixes


def _sort(text: NDArray[Any], suffixes: NDArray[np.int32], symbols: int) -> None:
    """Sort `text` into `suffixes`; every intermediate result lives inside `suffixes`."""
    if len(text) < 2:
        suffixes[:] = 0
        return
    bounds = bucket_bounds(text, symbols)
    count = _sort_lms_substrings(text, suffixes, bounds)
    if count > 1:
        names = _name_lms_substrings(text, suffixes, count)
        if names < count:
            reduced = suffixes[len(text) - count :]
            _sort(read_only(reduced), suffixes[:count], names)
            _restore_lms_positions(text, suffixes, count)
    _induce_from_sorted_lms(text, suffixes, bounds, count)


@kernel
def _find_foreign(tokens, vocab_size, sentinel):
    """Return the first position of an id that is neither in the vocabulary nor the sentinel; -1 if there is none."""
    for i in range(len(tokens)):
        token = np.int64(tokens[i])
        if token >= vocab_size and token != sentinel:
            return i
    return -1


@kernel
def bucket_bounds(text, symbols):
    """Return int32 [symbols + 1]: the first row of each first symbol; the sentinel is the last symbol."""
    bounds = np.zeros(symbols + 1, np.int32)
    for i in range(len(text)):
        bounds[min(np.int64(text[i]), symbols - 1) + 1] += 1
    for c in range(symbols):
        bounds[c + 1] += bounds[c]
    return bounds


@kernel
def _sort_lms_substrings(text, suffixes, bounds):
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
def _induce_l(text, suffixes, bounds):
    """Place the L-type suffixes in one scan from the left, starting from the LMS suffixes in place."""
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
def _induce_s(text, suffixes, bounds, mark_lms):
    """Place the S-type suffixes in one scan from the right; marked LMS positions are stored as complements."""
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
        if before == first and i < ends[c]:  # L-type: outside the part of its bucket filled by this scan
            continue
        ends[c] -= 1
        if mark_lms and v > 1 and text[v - 2] > before:
            suffixes[ends[c]] = ~(v - 1)
        else:
            suffixes[ends[c]] = v - 1


@kernel
def _name_lms_substrings(text, suffixes, count):
    """Replace each LMS substring by its rank; return the number of ranks."""
    n = len(text)
    # LMS positions are at least two apart: `position // 2` is a free cell, first for lengths, then for ranks.
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
    if names < count:  # the reduced text
        write = n - 1
        for i in range(min(count + n // 2, n - 1), count - 1, -1):
            if suffixes[i] >= 0:
                suffixes[write] = suffixes[i]
                write -= 1
    return names


@kernel
def _restore_lms_positions(text, suffixes, count):
    """Turn the order of the reduced text's suffixes into the order of the LMS positions that they represent."""
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
def _induce_from_sorted_lms(text, suffixes, bounds, count):
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
