"""The rows of a suffix that are read: all of them, or an evenly spaced sample.

A *sequence* is the rows read in one segment, given as reads [begin, end): read i is row

    first + (i + 1/2) * step              step = 1: every row

The tokens that follow the rows of a suffix are sorted. So the reads followed by one of them, which are rows of the
child's suffix (one token longer), are a contiguous part of the same sequence:

    reads            20  21  22  23  24  25            of (5 7), every 40th row
    token after it    7   7   7   9   9  11            reads of (5 7 9): 23, 24, for about 80 occurrences

A draft thus samples the rows of a suffix once, in proportion to its probability, and every descendant gets as many as
its own probability warrants. Its reads are next to those of its parent, hence in the cache.

Reading is bound by memory latency: a row costs a cache miss in `suffixes` and a dependent one in `tokens`. Several rows
are therefore read at a time, without branches between them, so that their misses overlap.
"""

import numpy as np

from draftstore.jit import leaf_kernel
from draftstore.search.suffix import token_at

BLOCK = 32
"""Reads at a time."""
WAYS = 16
"""Number of parts into which each round of a search divides a sequence."""


@leaf_kernel
def following(index, segment, first, step, read, offset):
    """Return the token at an offset from the start of a read; `vocab_size` at the end of the document or segment."""
    base, n = index.segments[segment, 0], index.segments[segment, 1]
    row = first + np.int64((read + 0.5) * step)
    token = token_at(index.tokens, base, n, np.int64(index.suffixes[base + row]) + offset)
    return token if 0 <= token < index.vocab_size else np.int64(index.vocab_size)


@leaf_kernel
def first_read(index, segment, first, step, begin, end, offset, token):
    """Return the first of the reads [begin, end) with at least `token` at an offset; `end` if there is none."""
    while begin < end:
        parts, below = min(np.int64(WAYS), end - begin), np.int64(0)
        part = (end - begin) // parts
        for i in range(parts):
            below += following(index, segment, first, step, begin + i * part, offset) < token
        low = begin
        if below > 0:
            begin = low + (below - 1) * part + 1
        if below < parts:
            end = low + below * part
    return begin


@leaf_kernel
def run_end(index, segment, first, step, read, end, offset, token):
    """Return the end of the run of `token` at `read`, which fills at least one block, by galloping."""
    stride = np.int64(BLOCK)
    while read + stride < end and following(index, segment, first, step, read + stride, offset) == token:
        read += stride
        stride *= 2
    return first_read(index, segment, first, step, read + 1, min(read + stride, end), offset, token + 1)
