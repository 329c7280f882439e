"""Walks down draft trees along a text; siblings may be in any order."""

import numpy as np

from draftstore.jit import kernel, leaf_kernel


@leaf_kernel
def walk(tokens, parents, ids, visit, state):
    """Follow token ids, int32 [any], read-only, down a tree until one is missing.

    Args:
        visit: leaf kernel, called as `visit(state, node, child)` for the context (-1) and each node on the path; child
            is the next node, -1 if the tree has none. Compiled into the walk.

    Returns:
        The number of nodes on the path.
    """
    node, depth = np.int64(-1), 0
    for token in ids:
        child = np.int64(-1)
        for i in range(node + 1, len(tokens)):
            if parents[i] == node and tokens[i] == token:
                child = np.int64(i)
        visit(state, node, child)
        if child < 0:
            break
        node, depth = child, depth + 1
    return depth


@leaf_kernel
def steps_below(levels, node, parent):
    """Return the levels between a node and its parent (-1: the context): its probability given its parent."""
    before = np.int64(levels[parent]) if parent >= 0 else np.int64(0)
    return max(np.int64(0), np.int64(levels[node]) - before)


@kernel
def find_fault(parents, tokens):
    """Return the first node whose parent does not precede it or that duplicates a sibling; -1 if there is none."""
    cells = 16
    while cells < 2 * len(tokens):
        cells *= 2
    table = np.full(cells, -1, np.int32)  # hash table of nodes by parent and token
    for node in range(len(tokens)):
        parent, token = np.int64(parents[node]), np.int64(tokens[node])
        if parent < -1 or parent >= node:
            return node
        cell = (token * 40_503 + parent * 9_973) & (cells - 1)
        while table[cell] >= 0:
            if tokens[table[cell]] == token and parents[table[cell]] == parent:
                return node
            cell = (cell + 1) & (cells - 1)
        table[cell] = node
    return -1
