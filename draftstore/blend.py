"""One draft tree from several: each has a weight, equal paths add up.

The chance of a path is the sum, over all trees that hold it, of the tree's weight times the path's chance there. With
weights that sum to at most one, a child never becomes likelier than its parent, so the best nodes again form a tree.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.frontier import (
    depth_of,
    enter,
    may_have_children,
    new_frontier,
    parent_of,
    token_of,
    unpack_nodes,
)
from draftstore.jit import kernel, leaf_kernel
from draftstore.tree import LEVEL_PROBS


class _Trie(NamedTuple):
    """All paths of all trees; place 0 is the context, its children hang in lists.

    Attributes:
        tokens: int64 [places].
        probs: float64 [places].
        child: int32 [places], first child; 0 is none.
        sibling: int32 [places], next child of the same parent; 0 is none.
    """

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]
    child: NDArray[np.int32]
    sibling: NDArray[np.int32]


@kernel
def blend(
    tokens: Any,
    parents: Any,
    levels: Any,
    stops: Any,
    weights: Any,
    budget: Any,
    max_depth: Any,
    max_level: Any,
) -> Any:
    """Blend draft trees that stand one behind the other.

    Args:
        tokens: int32 [all nodes].
        parents: int16 [all nodes], counted inside each tree.
        levels: uint8 [all nodes].
        stops: int64 [trees], node after the last of each tree.
        weights: float64 [trees], at least 0, together at most 1.
        budget: most nodes of the blend.
        max_depth: most tokens of a path.
        max_level: highest level that a node may have.

    Returns:
        tokens int32 [n], parents int16 [n], levels uint8 [n].
    """
    trie = _new_trie(len(tokens) + 1)
    places = np.empty(len(tokens), np.int64)
    size, start = 1, 0
    for tree in range(len(stops)):
        for node in range(start, stops[tree]):
            parent = places[start + parents[node]] if parents[node] >= 0 else np.int64(0)
            place = _find_child(trie, parent, np.int64(tokens[node]))
            if place == 0:
                place = np.int64(size)
                _add_child(trie, size, parent, np.int64(tokens[node]))
                size += 1
            trie.probs[place] += weights[tree] * LEVEL_PROBS[levels[node]]
            places[node] = place
        start = stops[tree]
    nodes = new_frontier(budget)
    count = _grow(trie, nodes, np.empty(budget + 1, np.int64), max_depth, max_level)
    best_tokens, best_parents = np.empty(count, np.int32), np.empty(count, np.int16)
    best_levels = np.empty(count, np.uint8)
    unpack_nodes(nodes, count, best_tokens, best_parents, best_levels)
    return best_tokens, best_parents, best_levels


@kernel
def _new_trie(places: Any) -> Any:
    """Return a trie of the context alone."""
    return _Trie(
        np.empty(places, np.int64),
        np.zeros(places, np.float64),
        np.zeros(places, np.int32),
        np.zeros(places, np.int32),
    )


@leaf_kernel
def _find_child(trie: Any, parent: Any, token: Any) -> Any:
    """Return the place of a parent's child with a token, 0 if it has none."""
    place = np.int64(trie.child[parent])
    while place > 0 and trie.tokens[place] != token:
        place = np.int64(trie.sibling[place])
    return place


@leaf_kernel
def _add_child(trie: Any, size: Any, parent: Any, token: Any) -> Any:
    """Hang a new child in at the end of the trie."""
    trie.tokens[size] = token
    trie.sibling[size] = trie.child[parent]
    trie.child[parent] = size


@leaf_kernel
def _grow(trie: Any, nodes: Any, places: Any, max_depth: Any, max_level: Any) -> Any:
    """Fill `nodes` with the best ones; return their number. `places` int64 [budget + 1] is room for theirs."""
    tail = _enter_children(trie, nodes, 0, 0, 1, 0, max_level)
    places[0] = 0
    head = 0
    while head < tail:
        depth = depth_of(nodes, head)
        place = _find_child(trie, places[parent_of(nodes, head)], token_of(nodes, head))
        places[head + 1] = place
        if depth < max_depth and trie.child[place] > 0 and may_have_children(nodes, head, tail):
            tail = _enter_children(trie, nodes, place, tail, depth + 1, head + 1, max_level)
        head += 1
    return tail


@leaf_kernel
def _enter_children(
    trie: Any, nodes: Any, place: Any, tail: Any, depth: Any, parent: Any, max_level: Any
) -> Any:
    """Enter the children of a place; return the new tail."""
    child = np.int64(trie.child[place])
    while child > 0:
        tail = enter(nodes, tail, trie.tokens[child], trie.probs[child], depth, parent, max_level)
        child = np.int64(trie.sibling[child])
    return tail
