"""Kernels that write entries of n-grams in the prefix codes of `draftstore.stores.crest.codes`, and read them.

An entry is a stream of bits, the highest of a byte first: occurrences of the n-gram and distinct tokens that followed
it (the end of a document counts as one), both at most 2^32 - 1, number of nodes, then for each node its token, its
parent plus one, and the difference of its level from that of the previous node. The last byte is padded with zeros. A
number is the code of its bit length, followed by its bits after the first.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.codec import MAX_NODES, WRONG_LENGTH, WRONG_PARENT, WRONG_TOKEN

NUMBERS, TOKENS, PARENTS, LEVELS = range(4)
ALPHABETS = 4
ESCAPE = 1 << 32
MAX_BITS = 32
MAX_COUNT = (1 << 32) - 1
HEAD_BITS = 11
HEAD, ROW = 1 << HEAD_BITS, MAX_BITS + 1
LIMITS = ALPHABETS * HEAD
FIRSTS = LIMITS + ALPHABETS * ROW
RANKED = FIRSTS + ALPHABETS * ROW
"""Places in the table for reading; see `draftstore.stores.crest.codes.read_codes`."""
MAX_NODE_BYTES = 36
"""Three escapes of 32 bits, each with a number of 64 bits."""
PADDING = 64
"""Zeros that must follow the entries to read: more than the bytes of a node or of the three numbers before nodes."""


class Writing(NamedTuple):
    """Codes by symbol, the alphabets concatenated.

    Attributes:
        starts: int64 [5], first symbol of each alphabet.
        symbols: int64 [symbols], ascending; the last of an alphabet is ESCAPE.
        codes: int64 [symbols].
        bits: int64 [symbols], length of each code.
    """

    starts: NDArray[np.int64]
    symbols: NDArray[np.int64]
    codes: NDArray[np.int64]
    bits: NDArray[np.int64]


@leaf_kernel
def _put_bits(out, bit, value, count):
    """Write the lowest `count` bits of a value into zeros; return the position after them."""
    for i in range(count - 1, -1, -1):
        out[bit >> 3] |= np.uint8(((value >> i) & 1) << (7 - (bit & 7)))
        bit += 1
    return bit


@leaf_kernel
def _put_symbol(codes, alphabet, symbol, out, bit):
    """Write the code of a symbol, or of ESCAPE; return the position after it, and whether it had a code."""
    low, high = codes.starts[alphabet], codes.starts[alphabet + 1] - 1
    escape = high
    while low < high:
        middle = (low + high) // 2
        if codes.symbols[middle] < symbol:
            low = middle + 1
        else:
            high = middle
    known = codes.symbols[low] == symbol
    place = low if known else escape
    return _put_bits(out, bit, codes.codes[place], codes.bits[place]), known


@leaf_kernel
def _put_number(codes, value, out, bit):
    """Write a number below 2^32; return the position after it."""
    count = np.int64(0)
    while value >> count:
        count += 1
    bit, _ = _put_symbol(codes, NUMBERS, count, out, bit)
    return _put_bits(out, bit, value, max(count - 1, 0))


@leaf_kernel
def _put_value(codes, alphabet, value, out, bit):
    """Write a value of an alphabet, escaped if it has no code; return the position after it."""
    bit, known = _put_symbol(codes, alphabet, value, out, bit)
    if not known:
        bit = _put_number(codes, value, out, bit)
    return bit


@kernel
def code_entries(codes, tokens, parents, levels, sizes, counts, distinct):
    """Encode the entries of trees: a Writing and the arrays of `draftstore.search.cutting.Trees`.

    Returns the coded bytes uint8 [bytes], and the end of each entry in them, int64 [entries].
    """
    ends = np.zeros(len(sizes), np.int64)
    out = np.zeros(PADDING * len(sizes) + MAX_NODE_BYTES * np.sum(sizes), np.uint8)
    bit = np.int64(0)
    for entry in range(len(sizes)):
        bit = _put_number(codes, min(counts[entry], MAX_COUNT), out, bit)
        bit = _put_number(codes, min(distinct[entry], MAX_COUNT), out, bit)
        bit = _put_number(codes, sizes[entry], out, bit)
        before = np.int64(0)
        for node in range(sizes[entry]):
            level = np.int64(levels[entry, node])
            bit = _put_value(codes, TOKENS, np.int64(tokens[entry, node]), out, bit)
            bit = _put_value(codes, PARENTS, np.int64(parents[entry, node]) + 1, out, bit)
            bit = _put_value(codes, LEVELS, (level - before) & 0xFF, out, bit)
            before = level
        ends[entry] = (bit + 7) >> 3
        bit = ends[entry] << 3
    return out[: bit >> 3], ends


@leaf_kernel
def _next_bits(data, bit):
    place = bit >> 5
    both = np.int64(data[place]) << 32 | np.int64(data[place + 1])
    return both >> (32 - (bit & 31)) & 0xFFFFFFFF


@leaf_kernel
def _get_symbol(codes, alphabet, data, bit):
    """Read a code; return its symbol, or -1, and the position after it."""
    ahead = _next_bits(data, bit)
    head = codes[alphabet * HEAD + (ahead >> (MAX_BITS - HEAD_BITS))]
    if head > 0:
        return head >> 6, bit + (head & 63)
    row, length = alphabet * ROW, HEAD_BITS + 1
    while length < MAX_BITS and ahead >= codes[LIMITS + row + length]:
        length += 1
    if ahead >= codes[LIMITS + row + length]:
        return np.int64(-1), bit
    place = codes[FIRSTS + row + length] + (ahead >> (MAX_BITS - length))
    return codes[place], bit + length


@leaf_kernel
def _get_number(codes, data, bit):
    """Read a number; return it, or -1, and the position after it."""
    count, bit = _get_symbol(codes, NUMBERS, data, bit)
    if count <= 1 or count > MAX_BITS:
        return (count if count <= 1 else np.int64(-1)), bit
    rest = _next_bits(data, bit) >> (MAX_BITS + 1 - count)
    return np.int64(1) << (count - 1) | rest, bit + count - 1


@leaf_kernel
def _get_value(codes, alphabet, data, bit):
    """Read a value of an alphabet; return it, or -1, and the position after it."""
    value, bit = _get_symbol(codes, alphabet, data, bit)
    if value == ESCAPE:
        value, bit = _get_number(codes, data, bit)
    return value, bit


@kernel
def read_entries(codes, data, ends, rows, batch, most, max_level):
    """Decode entries, each into a row of a batch of trees, up to `most` nodes and a level.

    `codes` is int64 [any], the table for reading; `data` uint32 [words], four coded bytes per word, the first the
    highest, followed by PADDING zeros; `ends` int64 [entries], the end of each in bytes; `rows` int64 [entries].
    Returns 0 or an error code of `draftstore.trees.codec`, tokens int32 [batch, most], parents int16 [batch, most],
    levels uint8 [batch, most], sizes int32 [batch], occurrences int64 [batch], distinct tokens int64 [batch].
    """
    tokens, parents = np.empty((batch, most), np.int32), np.empty((batch, most), np.int16)
    levels, sizes = np.empty((batch, most), np.uint8), np.zeros(batch, np.int32)
    counts = np.zeros((2, batch), np.int64)
    problem, start = np.int64(0), np.int64(0)
    for entry in range(len(ends)):
        row = rows[entry]
        problem, sizes[row], counts[0, row], counts[1, row] = _read_entry(
            codes, data, start, ends[entry], tokens[row], parents[row], levels[row], max_level
        )
        if problem != 0:
            break
        start = ends[entry]
    return problem, tokens, parents, levels, sizes, counts[0], counts[1]


@leaf_kernel
def _read_entry(codes, data, start, end, tokens, parents, levels, max_level):
    """Decode one entry; return 0 or an error code, the nodes that were kept, occurrences and distinct tokens."""
    occurrences, bit = _get_number(codes, data, start << 3)
    distinct, bit = _get_number(codes, data, bit)
    size, bit = _get_number(codes, data, bit)
    none, level = np.int64(0), np.int64(0)
    if min(occurrences, distinct, size) < 0 or size > MAX_NODES:
        return np.int64(WRONG_LENGTH), none, occurrences, distinct
    for node in range(size):
        token, bit = _get_value(codes, TOKENS, data, bit)
        parent, bit = _get_value(codes, PARENTS, data, bit)
        behind, bit = _get_value(codes, LEVELS, data, bit)
        if bit > end << 3:
            return np.int64(WRONG_LENGTH), none, occurrences, distinct
        if token < 0 or token > 0x7FFFFFFF:
            return np.int64(WRONG_TOKEN), none, occurrences, distinct
        if parent < 0 or parent > node or behind < 0:
            return np.int64(WRONG_PARENT), none, occurrences, distinct
        level = (level + behind) & 0xFF
        if node == len(tokens) or level > max_level:  # the rest is not wanted
            return np.int64(0), node, occurrences, distinct
        tokens[node], parents[node], levels[node] = token, parent - 1, level
    problem = np.int64(0 if (bit + 7) >> 3 == end else WRONG_LENGTH)
    return problem, size, occurrences, distinct
