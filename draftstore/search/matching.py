"""Occurrences of a text's suffixes in a store.

The text is the context followed by a node's path. Rows are kept by node and suffix length: those of a child's suffix
are a subset of its parent's rows for the suffix one token shorter, so going down the tree narrows them step by step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.search.rows import first_read
from draftstore.search.suffix import find_rows

ENOUGH = 0.25
"""Minimum fraction of the wanted reads left of a parent's sequence; below it, the suffix is searched.

If none is left, the suffix counts as absent: searching it as well makes drafts slower, without better acceptance.
"""


class Matches(NamedTuple):
    """The text of the current node, and the rows of all nodes' suffixes so far.

    Attributes:
        text: [max_match + depth], the context followed by the path.
        rows: [slots, max_match + depth + 1, segments, 3], the sequence (first row, begin, end) of a slot (0 = the
            context, i + 1 = node i), suffix length and segment, see `draftstore.search.rows`; undefined where a suffix
            has the rows of the next longer one. `steps` has the step of each.
        counts: [slots, max_match + depth + 1], rows over all segments; an estimate unless every row is read.
        lengths: [slots, 3], longest and shortest suffix searched, and the distinct tokens that follow the longest.
    """

    text: NDArray[np.int64]
    rows: NDArray[np.int32]
    steps: NDArray[np.float64]
    counts: NDArray[np.float64]
    lengths: NDArray[np.int64]


@kernel
def new_matches(most, slots, segments):
    """Return arrays for texts of at most `most` tokens."""
    return Matches(
        np.empty(most, np.int64),
        np.empty((slots, most + 1, segments, 3), np.int32),
        np.empty((slots, most + 1, segments), np.float64),
        np.empty((slots, most + 1), np.float64),
        np.zeros((slots, 3), np.int64),
    )


@leaf_kernel
def load_context(text, context, max_match, vocab_size):
    """Copy the last tokens of the context to the front of `text`; return begin and end of the usable ones."""
    size = min(len(context), max_match)
    begin = 0
    for i in range(size):
        text[i] = context[len(context) - size + i]
        if text[i] < 0 or text[i] >= vocab_size:
            begin = i + 1
    return begin, size


@leaf_kernel
def find_longest(index, matches, begin, end):
    """Return the length of the context's longest suffix that occurs; its rows go into slot 0.

    All shorter suffixes occur as well, which allows a search for the length: down step by step from the number of
    tokens in a key (most matches are short), or up by galloping and bisection.
    """
    low, high = 0, end - begin
    middle, step = min(index.key_tokens, high), 1
    while low < high:
        _search(index, matches, end, 0, middle)
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
def find_suffix(index, matches, stop, slot, parent, length, wanted):
    """Find the rows of a suffix of a node's text, among its parent's if known; return their number. Longest first."""
    counts = matches.counts
    if slot == 0 or length <= matches.lengths[parent, 1]:
        _search(index, matches, stop, slot, length)
    elif length <= matches.lengths[parent, 0] and counts[parent, length - 1] == counts[parent, length]:
        counts[slot, length] = counts[slot, length + 1]  # the same occurrences, hence also for the child
    else:
        reads = _narrow(index, matches, stop, slot, parent, length)
        if reads < counts[slot, length] and reads < ENOUGH * wanted:
            _search(index, matches, stop, slot, length)
    return counts[slot, length]


@leaf_kernel
def _search(index, matches, stop, slot, length):
    """Find all rows of the suffix of `text[:stop]` with `length` tokens, in every segment."""
    text, start, count = matches.text, stop - length, np.int64(0)
    rows = matches.rows[slot, length]
    for segment in range(len(rows)):
        lo = np.int64(index.first_rows[segment, text[start]])
        hi = np.int64(index.first_rows[segment, text[start] + 1])
        if length > 1 and lo < hi:
            lo, hi = find_rows(index, segment, lo, hi, text, start, stop)
        rows[segment, 0], rows[segment, 1], rows[segment, 2] = lo, 0, hi - lo
        matches.steps[slot, length, segment] = 1.0
        count += hi - lo
    matches.counts[slot, length] = count


@leaf_kernel
def _narrow(index, matches, stop, slot, parent, length):
    """Keep the parent's reads that continue with the last token."""
    token, count, reads = matches.text[stop - 1], 0.0, np.int64(0)
    rows, parent_rows = matches.rows[slot, length], matches.rows[parent, length - 1]
    for segment in range(len(rows)):
        step, first = matches.steps[parent, length - 1, segment], np.int64(parent_rows[segment, 0])
        begin, end = np.int64(parent_rows[segment, 1]), np.int64(parent_rows[segment, 2])
        begin = first_read(index, segment, first, step, begin, end, length - 1, token)
        end = first_read(index, segment, first, step, begin, end, length - 1, token + 1)
        rows[segment, 0], rows[segment, 1], rows[segment, 2] = first, begin, end
        matches.steps[slot, length, segment] = step
        reads += end - begin
        count += (end - begin) * step
    matches.counts[slot, length] = count
    return reads


@leaf_kernel
def read_fewer(matches, slot, length, reads):
    """Read only `reads` of a suffix's rows, evenly spaced, unless they are part of a sequence; return how many."""
    rows, steps, total = matches.rows[slot, length], matches.steps[slot, length], np.int64(0)
    count = np.int64(matches.counts[slot, length])
    for segment in range(len(rows)):
        size = np.int64(rows[segment, 2] - rows[segment, 1])
        if reads < count and steps[segment] == 1.0 and size > 0:
            part = max(np.int64(1), reads * size // count)
            rows[segment, 0] += rows[segment, 1]
            rows[segment, 1], rows[segment, 2] = 0, part
            steps[segment] = np.float64(size) / np.float64(part)
            size = part
        total += size
    return total
