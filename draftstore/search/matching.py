"""Occurrences in a store of the suffixes of a text.

The text is the context followed by a node's path. Rows are kept by node and suffix length: those of a child's suffix
are a subset of its parent's rows for the suffix one token shorter, so going down the tree narrows them step by step.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.search.suffix import find_rows


class Matches(NamedTuple):
    """The text of the current node, and the rows of all nodes' suffixes so far.

    Attributes:
        text: int64 [max_match + depth], the context followed by the path.
        ranges: int32 [slots, max_match + depth + 1, segments, 2], rows [lo, hi) by slot (0 = the context, i + 1 =
            node i), suffix length and segment; undefined where a suffix has the rows of the next longer one.
        counts: int64 [slots, max_match + depth + 1], rows over all segments.
        lengths: int64 [slots, 3], longest and shortest suffix searched, and the distinct tokens that follow the
            longest, by slot.
    """

    text: NDArray[np.int64]
    ranges: NDArray[np.int32]
    counts: NDArray[np.int64]
    lengths: NDArray[np.int64]


@kernel
def new_matches(most: Any, slots: Any, segments: Any) -> Any:
    """Return arrays for texts of at most `most` tokens."""
    return Matches(
        np.empty(most, np.int64),
        np.empty((slots, most + 1, segments, 2), np.int32),
        np.empty((slots, most + 1), np.int64),
        np.zeros((slots, 3), np.int64),
    )


@leaf_kernel
def load_context(text: Any, context: Any, max_match: Any, vocab_size: Any) -> Any:
    """Copy the last tokens of the context to the front of `text`; return begin and end of the usable ones."""
    size = min(len(context), max_match)
    begin = 0
    for i in range(size):
        text[i] = context[len(context) - size + i]
        if text[i] < 0 or text[i] >= vocab_size:
            begin = i + 1
    return begin, size


@leaf_kernel
def find_longest(index: Any, matches: Any, begin: Any, end: Any) -> Any:
    """Return the length of the context's longest suffix that occurs; its rows go into slot 0.

    If a suffix occurs, all shorter ones do, so the length is searched: starting with as many tokens as a key holds,
    step by step down (most matches are short), or up by galloping and bisection.
    """
    low, high = 0, end - begin
    middle, step = min(index.key_tokens, high), 1
    while low < high:
        matches.counts[0, middle] = _search(index, matches.text, end, middle, matches.ranges[0, middle])
        if matches.counts[0, middle] > 0:
            low = middle
        else:
            high = middle - 1
        if low == 0:
            middle = high
        else:
            middle, step = min(low + step, (low + high + 1) // 2), step * 2
    matches.lengths[0, 0] = low
    return low


@leaf_kernel
def find_suffix(index: Any, matches: Any, stop: Any, slot: Any, parent: Any, length: Any) -> Any:
    """Find the rows of a suffix of a node's text, among its parent's if known; return their number.

    Called for longer suffixes first. If two suffixes of the parent have equal counts, they have the same occurrences,
    and so do the child's: only the longer one is searched.
    """
    counts, ranges = matches.counts, matches.ranges[slot, length]
    if slot == 0 or length <= matches.lengths[parent, 1]:
        counts[slot, length] = _search(index, matches.text, stop, length, ranges)
    elif length <= matches.lengths[parent, 0] and counts[parent, length - 1] == counts[parent, length]:
        counts[slot, length] = counts[slot, length + 1]
    else:
        rows = matches.ranges[parent, length - 1]
        counts[slot, length] = _narrow(index, matches.text, stop, length, rows, ranges)
    return counts[slot, length]


@leaf_kernel
def _search(index: Any, text: Any, stop: Any, length: Any, ranges: Any) -> Any:
    """Find the rows of the suffix of `text[:stop]` of one length in every segment; return their number."""
    start = stop - length
    for segment in range(len(index.segments)):
        lo = np.int64(index.first_rows[segment, text[start]])
        hi = np.int64(index.first_rows[segment, text[start] + 1])
        if length > 1 and lo < hi:
            lo, hi = find_rows(index, segment, lo, hi, 1, text, start, stop)
        ranges[segment, 0], ranges[segment, 1] = lo, hi
    return _count(ranges)


@leaf_kernel
def _narrow(index: Any, text: Any, stop: Any, length: Any, parent_ranges: Any, ranges: Any) -> Any:
    """Narrow the rows of a suffix one token shorter to those that continue with the last token; return their number."""
    for segment in range(len(ranges)):
        lo, hi = np.int64(parent_ranges[segment, 0]), np.int64(parent_ranges[segment, 1])
        if lo < hi:
            lo, hi = find_rows(index, segment, lo, hi, length - 1, text, stop - length, stop)
        ranges[segment, 0], ranges[segment, 1] = lo, hi
    return _count(ranges)


@leaf_kernel
def _count(ranges: Any) -> Any:
    """Sum the rows of a suffix over all segments."""
    count = np.int64(0)
    for segment in range(len(ranges)):
        count += ranges[segment, 1] - ranges[segment, 0]
    return count
