"""A trie of draft trees, whose nodes get new probabilities: the best ones form a draft tree again."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.frontier import enter, grow, token_of


class Trie(NamedTuple):
    """All paths of all trees; node 0 is the context, children are linked lists, and 0 ends a list."""

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]
    child: NDArray[np.int32]
    sibling: NDArray[np.int32]


@kernel
def new_trie(places):
    """Return a trie with only the context."""
    return Trie(
        np.empty(places, np.int64),
        np.zeros(places, np.float64),
        np.zeros(places, np.int32),
        np.zeros(places, np.int32),
    )


@leaf_kernel
def place_node(trie, size, parent, token):
    """Return the place of a parent's child with a token, which is `size` if it is new."""
    place = _find_child(trie, parent, token)
    if place == 0:
        place = np.int64(size)
        trie.tokens[size] = token
        trie.sibling[size] = trie.child[parent]
        trie.child[parent] = size
    return place


@leaf_kernel
def _find_child(trie, parent, token):
    """Return a parent's child with a token, 0 if there is none."""
    place = np.int64(trie.child[parent])
    while place > 0 and trie.tokens[place] != token:
        place = np.int64(trie.sibling[place])
    return place


@leaf_kernel
def keep_best(trie, nodes, places, max_depth, max_level):
    """Fill `nodes` with a trie's best nodes; return their number. `places` int64 [budget + 1] is scratch space."""
    return grow(nodes, max_depth, _enter_branches, (trie, places), max_level)


@leaf_kernel
def _enter_branches(state, nodes, slot, parent, depth, _prob, tail, max_level):
    trie, places = state
    place = _find_child(trie, places[parent], token_of(nodes, slot - 1)) if slot > 0 else np.int64(0)
    places[slot] = place
    child = np.int64(trie.child[place])
    while child > 0:
        tail = enter(nodes, tail, trie.tokens[child], trie.probs[child], depth + 1, slot, max_level)
        child = np.int64(trie.sibling[child])
    return tail
