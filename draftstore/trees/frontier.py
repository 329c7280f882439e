"""Best-first growth of a draft tree, shared by all drafters: one sorted array and a loop over it.

The array has room for `budget` nodes. Nodes before the head are final; those after it await expansion. A child never
sorts before its parent, so the node at the head is always the best one left; when the array is full, a new node must
beat the last. A key contains the whole node:

    bits 62-54    53-48    47-17    16-0
    level         depth    token    slot of the parent (0 = the context, i + 1 = node i)

so that keys sort in the order that the contract of draft trees requires: descending probability, then parents first,
then token id.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.tree import LEVEL_BOUNDS, LEVELS_PER_OCTAVE

BUDGET = 64
"""Maximum nodes of a draft, unless a caller says otherwise."""
MAX_BUDGET = 4096
"""Maximum nodes of a tree."""
MAX_DEPTH = 63
"""Maximum tokens of a path."""

_PARENT_BITS = 17
_TOKEN_BITS = 31
_DEPTH_BITS = 6
_TOKEN_SHIFT = _PARENT_BITS
_DEPTH_SHIFT = _TOKEN_SHIFT + _TOKEN_BITS
_LEVEL_SHIFT = _DEPTH_SHIFT + _DEPTH_BITS
_PARENT_MASK = (1 << _PARENT_BITS) - 1
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1
_DEPTH_MASK = (1 << _DEPTH_BITS) - 1
_LEVELS = len(LEVEL_BOUNDS)


class Frontier(NamedTuple):
    """The best nodes so far, ascending by key, with their probabilities before rounding; both [budget]."""

    keys: NDArray[np.int64]
    probs: NDArray[np.float64]


@kernel
def new_frontier(budget):
    """Return an array for at most `budget` nodes."""
    return Frontier(np.empty(budget, np.int64), np.empty(budget, np.float64))


@leaf_kernel
def grow(nodes, max_depth, enter_children, state, max_level):
    """Grow a tree best-first in an empty Frontier; return the number of its nodes.

    `enter_children` is a leaf kernel that enters the children of a slot and returns the new tail, compiled into the
    loop. It is called as `enter_children(state, nodes, slot, parent, depth, prob, tail, max_level)`, with the slot's
    parent, depth and probability (0, 0 and 1.0 for the context).
    """
    tail = slot = parent = depth = 0
    prob = 1.0
    while slot <= tail:
        if slot > 0:
            parent, depth, prob = parent_of(nodes, slot - 1), depth_of(nodes, slot - 1), nodes.probs[slot - 1]
        if slot == 0 or (depth < max_depth and may_have_children(nodes, slot - 1, tail)):
            tail = enter_children(state, nodes, slot, parent, depth, prob, tail, max_level)
        slot += 1
    return tail


@leaf_kernel
def token_of(nodes, node):
    """Return the token of a node."""
    return (nodes.keys[node] >> _TOKEN_SHIFT) & _TOKEN_MASK


@leaf_kernel
def parent_of(nodes, node):
    """Return the slot of a node's parent."""
    return nodes.keys[node] & _PARENT_MASK


@leaf_kernel
def depth_of(nodes, node):
    """Return the depth of a node: 1 for a child of the context."""
    return (nodes.keys[node] >> _DEPTH_SHIFT) & _DEPTH_MASK


@leaf_kernel
def may_have_children(nodes, node, tail):
    """Return True if the best possible child of a node would fit among the first `tail`."""
    if tail < len(nodes.keys):
        return True
    level = nodes.keys[node] >> _LEVEL_SHIFT
    least_child = ((level << _DEPTH_BITS) | (depth_of(nodes, node) + 1)) << _DEPTH_SHIFT
    return least_child < nodes.keys[tail - 1]


@leaf_kernel
def unpack_nodes(nodes, size, tokens, parents, levels):
    """Unpack the keys of the first `size` nodes."""
    keys = nodes.keys
    for i in range(size):
        tokens[i] = (keys[i] >> _TOKEN_SHIFT) & _TOKEN_MASK
        parents[i] = (keys[i] & _PARENT_MASK) - 1
        levels[i] = keys[i] >> _LEVEL_SHIFT


@leaf_kernel
def enter(nodes, tail, token, prob, depth, parent, max_level):
    """Insert a node in key order, dropping the last of a full array; return the new tail."""
    keys, probs = nodes.keys, nodes.probs
    full = tail == len(keys)
    if full and prob < LEVEL_BOUNDS[keys[tail - 1] >> _LEVEL_SHIFT]:
        return tail
    level = _level(prob)
    if level > max_level:
        return tail
    key = (((((np.int64(level) << _DEPTH_BITS) | depth) << _TOKEN_BITS) | token) << _PARENT_BITS) | parent
    if full:
        if key > keys[tail - 1]:
            return tail
        tail -= 1
    place = tail
    while place > 0 and keys[place - 1] > key:
        keys[place] = keys[place - 1]
        probs[place] = probs[place - 1]
        place -= 1
    keys[place] = key
    probs[place] = prob
    return tail + 1


@leaf_kernel
def _level(prob):
    """Return the level of a probability: the first whose bound it reaches, 256 if none."""
    if prob < LEVEL_BOUNDS[_LEVELS - 1]:
        return _LEVELS
    # A first guess: comparisons with the bounds decide, identically on every machine.
    level = max(0, int(0.5 - LEVELS_PER_OCTAVE * math.log2(prob)))
    while level > 0 and prob >= LEVEL_BOUNDS[level - 1]:
        level -= 1
    while prob < LEVEL_BOUNDS[level]:
        level += 1
    return level
