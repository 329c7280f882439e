"""Kernels of the binary codec of draft trees, in the format that `trees.tree` describes.

Trees come from disks and networks, so reading one checks everything that later code relies on, and returns an error
code (below) for an invalid tree.
"""

import numpy as np

from draftstore.jit import kernel, leaf_kernel

CODEC_VERSION = 1
HEADER_BYTES = 4
WIDE_TOKENS = 1
WIDE_PARENTS = 2
MAX_NODES = 2**15 - 1

CUT = -1
"""Fewer bytes than a tree's header."""
OTHER_VERSION = -2
UNKNOWN_FLAGS = -3
WRONG_LENGTH = -4
"""The size does not match the number of nodes, or there are more nodes than a tree may have."""
WRONG_PARENT = -5
"""A node precedes its parent."""
WRONG_TOKEN = -6
"""A token outside the vocabulary."""
WRONG_ORDER = -7
"""Nodes are not in the order of level, depth, token, parent."""
TWINS = -8
"""Two children of one node carry the same token."""
TOO_MANY = -9
"""More nodes than requested."""


@leaf_kernel
def tree_flags(tokens, size):
    """Return the flags of the narrowest format for the first `size` nodes."""
    widest = np.int64(0)
    for i in range(size):
        widest = max(widest, np.int64(tokens[i]))
    return WIDE_TOKENS * (widest > 0xFFFF) | WIDE_PARENTS * (size > 0x100)


@leaf_kernel
def tree_bytes(flags, size):
    """Return the encoded size of a tree in bytes."""
    return HEADER_BYTES + size * ((4 if flags & WIDE_TOKENS else 2) + (2 if flags & WIDE_PARENTS else 1) + 1)


@leaf_kernel
def _put_number(out, place, value, width):
    """Write a little-endian number of `width` bytes; return the position after it."""
    for i in range(width):
        out[place + i] = (value >> (8 * i)) & 0xFF
    return place + width


@leaf_kernel
def get_number(data, place, width):
    """Read a little-endian number of `width` bytes."""
    value = np.int64(0)
    for i in range(width):
        value |= np.int64(data[place + i]) << (8 * i)
    return value


@leaf_kernel
def write_tree(tokens, parents, levels, size, flags, out, place):
    """Write a tree of `size` nodes at a position; return the position after it."""
    token_width = 4 if flags & WIDE_TOKENS else 2
    parent_width = 2 if flags & WIDE_PARENTS else 1
    out[place] = CODEC_VERSION
    out[place + 1] = flags
    place = _put_number(out, place + 2, size, 2)
    for i in range(size):
        place = _put_number(out, place, np.int64(tokens[i]), token_width)
    for i in range(size):
        place = _put_number(out, place, np.int64(parents[i]) + 1, parent_width)
    for i in range(size):
        out[place + i] = levels[i]
    return place + size


@kernel
def encode_trees(tokens, parents, levels, sizes):
    """Encode and concatenate a batch of trees: tokens int32 [batch, width], parents int16, levels uint8, left-aligned.

    `sizes` int32 [batch] are their nodes. Returns the bytes of each tree, int32 [batch], and all bytes, uint8 [bytes].
    """
    batch = len(sizes)
    lengths = np.empty(batch, np.int32)
    flags = np.empty(batch, np.uint8)
    total = np.int64(0)
    for i in range(batch):
        flags[i] = tree_flags(tokens[i], sizes[i])
        lengths[i] = tree_bytes(flags[i], sizes[i])
        total += lengths[i]
    out = np.empty(total, np.uint8)
    place = np.int64(0)
    for i in range(batch):
        place = write_tree(tokens[i], parents[i], levels[i], sizes[i], flags[i], out, place)
    return lengths, out


@leaf_kernel
def tree_size(data, start, stop):
    """Return the number of nodes of the tree in bytes `start` to `stop`, or an error code."""
    if stop - start < HEADER_BYTES:
        return np.int64(CUT)
    if data[start] != CODEC_VERSION:
        return np.int64(OTHER_VERSION)
    flags = data[start + 1]
    if flags & ~np.uint8(WIDE_TOKENS | WIDE_PARENTS):
        return np.int64(UNKNOWN_FLAGS)
    size = get_number(data, start + 2, 2)
    if size > MAX_NODES or tree_bytes(flags, size) != stop - start:
        return np.int64(WRONG_LENGTH)
    return size


@leaf_kernel
def _read_tree(data, start, size, tokens, parents, levels):
    """Read a tree measured by `tree_size` into arrays; return 0 or an error code."""
    flags = data[start + 1]
    token_width = 4 if flags & WIDE_TOKENS else 2
    parent_width = 2 if flags & WIDE_PARENTS else 1
    start += HEADER_BYTES
    for i in range(size):
        at = start + i * token_width
        token = np.int64(data[at]) | np.int64(data[at + 1]) << 8
        if token_width == 4:
            token |= np.int64(data[at + 2]) << 16 | np.int64(data[at + 3]) << 24
            if token > 0x7FFFFFFF:
                return WRONG_TOKEN
        tokens[i] = token
    start += size * token_width
    for i in range(size):
        at = start + i * parent_width
        parent = np.int64(data[at]) - 1
        if parent_width == 2:
            parent += np.int64(data[at + 1]) << 8
        if parent >= i:
            return WRONG_PARENT
        parents[i] = parent
    start += size * parent_width
    for i in range(size):
        levels[i] = data[start + i]
    return 0


@leaf_kernel
def _check_tree(tokens, parents, levels, size, vocab_size, depths, marks, mark):
    """Check the guarantees of `DraftTree` other than the order of parents; return 0 or an error code."""
    depths[0] = 0
    for i in range(size):
        token, parent = np.int64(tokens[i]), np.int64(parents[i])
        if token >= vocab_size:
            return WRONG_TOKEN
        depths[i + 1] = depths[parent + 1] + 1
        # A hash table of parent and token that holds the last tree in each slot: only collisions are compared.
        place = (token * 40_503 + parent * 9_973) & (len(marks) - 1)
        if marks[place] == mark:
            for other in range(i):
                if tokens[other] == token and parents[other] == parent:
                    return TWINS
        marks[place] = mark
        if i > 0 and not _in_order(tokens, parents, levels, depths, i):
            return WRONG_ORDER
    return 0


@leaf_kernel
def _in_order(tokens, parents, levels, depths, i):
    """Return True if node i sorts after the one before it by level, depth, token and parent."""
    if levels[i] != levels[i - 1]:
        return levels[i] > levels[i - 1]
    if depths[i + 1] != depths[i]:
        return depths[i + 1] > depths[i]
    if tokens[i] != tokens[i - 1]:
        return tokens[i] > tokens[i - 1]
    return parents[i] > parents[i - 1]


@leaf_kernel
def _marks_for(size):
    places = 16
    while places < 16 * size:
        places *= 2
    return places


@kernel
def decode_drafts(data, start, batch, vocab_size, budget):
    """Decode the drafts of a batch of contexts, a table and concatenated trees, which end with the data.

    The table, at `start` of the data, uint8 [bytes], read-only, is u32 [3, batch]: bytes of each tree, match lengths,
    match counts. `vocab_size` is the upper bound of tokens; 0 trusts the writer and checks only parents. Trees have at
    most `budget` nodes.

    Returns 0 or an error code, the first tree with that error, and the arrays of a `DraftBatch`.
    """
    sizes, matches, counts = np.zeros(batch, np.int32), np.empty(batch, np.int32), np.empty(batch, np.int64)
    width, place = np.int64(0), np.int64(start + 12 * batch)
    problem, wrong = np.int64(0), np.int64(batch)
    for i in range(batch):
        stop = place + get_number(data, start + 4 * i, 4)
        matches[i] = get_number(data, start + 4 * (batch + i), 4)
        counts[i] = get_number(data, start + 4 * (2 * batch + i), 4)
        size = tree_size(data, place, stop) if stop <= len(data) else np.int64(WRONG_LENGTH)
        if size > budget:
            size = np.int64(TOO_MANY)
        if size < 0:
            problem, wrong = size, np.int64(i)
            break
        width = max(width, size)
        sizes[i] = size
        place = stop
    if problem == 0 and place != len(data):
        problem = np.int64(WRONG_LENGTH)
    rows = batch if problem == 0 else 0
    tokens, parents = np.empty((rows, width), np.int32), np.empty((rows, width), np.int16)
    levels = np.empty((rows, width), np.uint8)
    depths, marks = np.empty(width + 1, np.int32), np.zeros(_marks_for(width), np.int64)
    place = np.int64(start + 12 * batch)
    for i in range(rows):
        problem = np.int64(_read_tree(data, place, sizes[i], tokens[i], parents[i], levels[i]))
        if problem == 0 and vocab_size > 0:
            problem = np.int64(
                _check_tree(tokens[i], parents[i], levels[i], sizes[i], vocab_size, depths, marks, i + 1)
            )
        if problem != 0:
            wrong = np.int64(i)
            break
        place += get_number(data, start + 4 * i, 4)
    return problem, wrong, tokens, parents, levels, sizes, matches, counts
