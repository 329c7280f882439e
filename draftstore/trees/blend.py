"""Weighted merge of draft trees: the probability of a path is the weighted sum of its probabilities in the trees.

With weights that sum to at most one, a child is never likelier than its parent, so the best nodes form a tree.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.codec import get_number, read_tree, tree_size
from draftstore.trees.frontier import enter, grow, new_frontier, token_of, unpack_nodes
from draftstore.trees.tree import LEVEL_PROBS

ENTRY_HEAD = 8
"""Bytes of an entry before its tree, see `draftstore.stores.crest.envelope`."""


class Trie(NamedTuple):
    """All paths of all trees; node 0 is the context, children are linked lists, and 0 ends a list."""

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64]
    child: NDArray[np.int32]
    sibling: NDArray[np.int32]


@kernel
def blend_entries(
    data: Any,
    stops: Any,
    lasts: Any,
    alpha: Any,
    beta: Any,
    budget: Any,
    max_depth: Any,
    max_level: Any,
) -> Any:
    """Blend the entries of each context of a batch, longest n-gram first.

    An n-gram that occurs c times, followed by d distinct tokens, gets c / (c + beta * d + alpha) of the remaining
    probability; so does the shortest one, so that rare continuations are not drafted as if they were certain. With
    alpha = beta = 0 the first gets everything.

    Args:
        data: uint8 [bytes], read-only, concatenated entries: occurrences u32, distinct tokens u32, tree.
        stops: int64 [entries], end of each entry.
        lasts: int64 [batch], end of each context's entries.

    Returns:
        0 or an error code of `draftstore.trees.codec`, tokens int32 [batch, budget], parents int16 [batch, budget],
        levels uint8 [batch, budget], sizes int32 [batch], occurrences of the longest n-gram int64 [batch].
    """
    batch = len(lasts)
    tokens, parents = np.empty((batch, budget), np.int32), np.empty((batch, budget), np.int16)
    levels = np.empty((batch, budget), np.uint8)
    sizes, occurrences = np.zeros(batch, np.int32), np.zeros(batch, np.int64)
    problem, total = _measure_entries(data, stops, lasts)
    scratch = (np.empty(total, np.int32), np.empty(total, np.int16), np.empty(total, np.uint8))
    nodes = new_frontier(budget)
    first = np.int64(0)
    for row in range(batch if problem == 0 else 0):
        last = lasts[row]
        if last > first:
            problem, ends, weights, occurrences[row] = _read_entries(
                data, stops, first, last, alpha, beta, scratch
            )
            if problem != 0:
                break
            if len(ends) == 1 and weights[0] == 1.0:
                size = _copy_tree(scratch, ends[0], tokens[row], parents[row], levels[row], max_level)
            else:
                all_nodes = ends[-1]
                size = blend_trees(
                    scratch[0][:all_nodes], scratch[1][:all_nodes], scratch[2][:all_nodes], ends, weights, nodes,
                    max_depth, max_level,
                )  # fmt: skip
                unpack_nodes(nodes, size, tokens[row], parents[row], levels[row])
            sizes[row] = size
        first = last
    return problem, tokens, parents, levels, sizes, occurrences


@kernel
def _measure_entries(data: Any, stops: Any, lasts: Any) -> Any:
    """Return 0 or an error code, and the maximum total of nodes in the entries of a context."""
    most, entry, start = np.int64(0), 0, np.int64(0)
    for row in range(len(lasts)):
        total = np.int64(0)
        while entry < lasts[row]:
            size = tree_size(data, start + ENTRY_HEAD, stops[entry])
            if size < 0:
                return size, np.int64(0)
            total += size
            start = stops[entry]
            entry += 1
        most = max(most, total)
    return np.int64(0), most


@kernel
def _read_entries(data: Any, stops: Any, first: Any, last: Any, alpha: Any, beta: Any, scratch: Any) -> Any:
    """Read the trees of some entries; return an error code, each tree's end and weight, and the first's occurrences."""
    tokens, parents, levels = scratch
    ends, weights = np.empty(last - first, np.int64), np.empty(last - first, np.float64)
    occurrences, left, place = np.int64(0), 1.0, np.int64(0)
    for i in range(last - first):
        start = stops[first + i - 1] if first + i > 0 else np.int64(0)
        count, distinct = get_number(data, start, 4), get_number(data, start + 4, 4)
        if i == 0:
            occurrences = count
        whole = count + beta * distinct + alpha
        weights[i] = left * (count / whole) if whole > 0 else 0.0
        left -= weights[i]
        start += ENTRY_HEAD
        size = tree_size(data, start, stops[first + i])
        problem = read_tree(data, start, size, tokens, parents, levels, place)
        if problem != 0:
            return np.int64(problem), ends, weights, occurrences
        place += size
        ends[i] = place
    return np.int64(0), ends, weights, occurrences


@leaf_kernel
def _copy_tree(scratch: Any, size: Any, tokens: Any, parents: Any, levels: Any, max_level: Any) -> Any:
    """Copy a tree's nodes up to a level, until the arrays are full; return their number."""
    i = 0
    while i < min(size, len(tokens)) and scratch[2][i] <= max_level:
        tokens[i], parents[i], levels[i] = scratch[0][i], scratch[1][i], scratch[2][i]
        i += 1
    return i


@kernel
def blend_trees(
    tokens: Any,
    parents: Any,
    levels: Any,
    stops: Any,
    weights: Any,
    nodes: Any,
    max_depth: Any,
    max_level: Any,
) -> Any:
    """Fill the Frontier `nodes` with the best nodes of several draft trees; return their number.

    Args:
        tokens: int32 [all nodes] of the concatenated trees.
        parents: int16 [all nodes], relative to each tree.
        levels: uint8 [all nodes].
        stops: int64 [trees], end of each tree.
        weights: float64 [trees], non-negative, sum at most 1.
    """
    trie = new_trie(len(tokens) + 1)
    places = np.empty(len(tokens), np.int64)
    size, start = 1, 0
    for tree in range(len(stops)):
        size = place_nodes(trie, size, tokens, parents, start, stops[tree], places)
        for node in range(start, stops[tree]):
            trie.probs[places[node]] += weights[tree] * LEVEL_PROBS[levels[node]]
        start = stops[tree]
    return keep_best(trie, nodes, np.empty(len(nodes.keys) + 1, np.int64), max_depth, max_level)


@kernel
def new_trie(places: Any) -> Any:
    """Return a trie with only the context."""
    return Trie(
        np.empty(places, np.int64),
        np.zeros(places, np.float64),
        np.zeros(places, np.int32),
        np.zeros(places, np.int32),
    )


@leaf_kernel
def place_nodes(trie: Any, size: Any, tokens: Any, parents: Any, start: Any, stop: Any, places: Any) -> Any:
    """Insert a tree's nodes into a trie of `size` nodes, recording their places int64 [nodes]; return its new size."""
    for node in range(start, stop):
        parent = places[start + parents[node]] if parents[node] >= 0 else np.int64(0)
        places[node] = _find_child(trie, parent, np.int64(tokens[node]))
        if places[node] == 0:
            places[node] = size
            _add_child(trie, size, parent, np.int64(tokens[node]))
            size += 1
    return size


@leaf_kernel
def _find_child(trie: Any, parent: Any, token: Any) -> Any:
    """Return a parent's child with a token, 0 if there is none."""
    place = np.int64(trie.child[parent])
    while place > 0 and trie.tokens[place] != token:
        place = np.int64(trie.sibling[place])
    return place


@leaf_kernel
def _add_child(trie: Any, size: Any, parent: Any, token: Any) -> Any:
    trie.tokens[size] = token
    trie.sibling[size] = trie.child[parent]
    trie.child[parent] = size


@leaf_kernel
def keep_best(trie: Any, nodes: Any, places: Any, max_depth: Any, max_level: Any) -> Any:
    """Fill `nodes` with a trie's best nodes; return their number. `places` int64 [budget + 1] is scratch space."""
    return grow(nodes, max_depth, _enter_branches, (trie, places), max_level)


@leaf_kernel
def _enter_branches(
    state: Any, nodes: Any, slot: Any, parent: Any, depth: Any, _prob: Any, tail: Any, max_level: Any
) -> Any:
    trie, places = state
    place = _find_child(trie, places[parent], token_of(nodes, slot - 1)) if slot > 0 else np.int64(0)
    places[slot] = place
    child = np.int64(trie.child[place])
    while child > 0:
        tail = enter(nodes, tail, trie.tokens[child], trie.probs[child], depth + 1, slot, max_level)
        child = np.int64(trie.sibling[child])
    return tail
