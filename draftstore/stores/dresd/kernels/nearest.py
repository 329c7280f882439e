"""The nearest entries of a dense store: numba kernels over plain arrays, no files.

An entry is a unit vector and a token, the *first token* of its continuation in the corpus; it only answers queries with
that token. So entries are sorted by first token, and those with the same one form a *group*: a search stays inside its
group. A large group is divided into *lists* of near entries, each with a centroid (an inverted file index); a search
visits the lists with the centroids nearest to the query.

    first tokens  5 5 7 7 7 9            groups  [..., 0 (of 5), 2 (of 6), 2 (of 7), 5 (of 8), 5 (of 9), 6, ...]
    search for 7  visits the entries 2, 3, 4

Compilers may reorder the additions of a dot product: its last bits depend on the processor. Numba has no float16: rows
are read as their bits, and the exponent, 112 lower than that of a float32, is corrected.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel, reordering_kernel

LARGE = 8192
"""Minimum size of a group that is divided into lists: scanning smaller groups is about as fast as choosing lists."""
ALL = 1.0
"""Probing that visits the whole group."""
PROBING = 0.35
"""Default probing: finds 99 % of the ten nearest entries in groups of 8,000 to 26,000 hidden states of a language
model."""
_FRACTION = 13
"""Bits that a float32 has more in its fraction."""
_EXPONENT = np.int32(~0x70000000)
"""Clears the exponent's sign bits that a shift of the sign has filled."""
_SCALE = np.float32(2.0**112)


class DenseIndex(NamedTuple):
    """The arrays of a dense store for the kernels; all are read-only views.

    Attributes:
        vectors: uint16 [entries, dims], the bits of float16 vectors of unit length.
        positions: uint32 or uint64 [entries], see `draftstore.stores.dresd.store`.
        groups: int64 [vocab_size + 1], first entry of each group; last, the number of entries.
        group_lists: int32 [vocab_size + 1], first list of each group; small groups have none.
        lists: int64 [lists + 1], first entry of each list; last, the number of entries. A list ends where the next one
            starts, or with its group: the lists of a group cover it.
        centroids: float32 [lists, dims], of unit length.
    """

    vectors: NDArray[np.uint16]
    positions: NDArray[Any]
    groups: NDArray[np.int64]
    group_lists: NDArray[np.int32]
    lists: NDArray[np.int64]
    centroids: NDArray[np.float32]


@kernel
def search(index, queries, tokens, k, probing):
    """Return the nearest entries of queries, float32 [batch, dims], among those with their first tokens, int32 [batch].

    Queries may have any length; zero vectors and those with NaN have no neighbours, nor do ids outside the vocabulary.
    `probing` in (0, 1] is the share of a group of `LARGE` entries to visit. For equal recall, larger groups have a
    smaller share, by the square root of their size; small ones, and all with `ALL`, are visited completely.

    Returns entries int64 [batch, k], nearest first, ties by number, padded with -1, their cosines float32 [batch, k],
    padded with -inf, and the sizes of the groups, int64 [batch].
    """
    batch = len(tokens)
    entries = np.full((batch, k), -1, np.int64)
    similarities = np.full((batch, k), -np.inf, np.float32)
    sizes = np.empty(batch, np.int64)
    for i in range(batch):
        _, sizes[i] = find_nearest(index, queries[i], tokens[i], probing, entries[i], similarities[i])
    return entries, similarities, sizes


@kernel
def find_nearest(index, query, token, probing, entries, similarities):
    """Find the nearest entries of one query, see `search`; return how many, and the size of its group.

    `entries` int64 [k] and `similarities` float32 [k] are filled, nearest first.
    """
    if token < 0 or token + 1 >= len(index.groups):
        return np.int64(0), np.int64(0)
    start, stop = index.groups[token], index.groups[token + 1]
    size = stop - start
    norm = np.sqrt(_squares(query))
    if not (norm > 0.0 and norm < np.inf):
        return np.int64(0), size
    unit = (query / norm).astype(np.float32)
    first_list, last_list = np.int64(index.group_lists[token]), np.int64(index.group_lists[token + 1])
    if first_list == last_list or probing >= ALL:
        return _scan(index.vectors, unit, start, stop, np.int64(0), entries, similarities), size
    wanted = probing * np.sqrt(size * np.float64(LARGE))
    found = _probe(index, unit, first_list, last_list, stop, wanted, entries, similarities)
    return found, size


@kernel
def _probe(index, query, first, last, end, wanted, entries, similarities):
    """Visit the lists of a group, nearest centroids first, until enough entries are seen; return the number found."""
    waiting = np.arange(first, last)
    nearness = np.empty(last - first, np.float32)
    for i in range(first, last):
        nearness[i - first] = dot(index.centroids, i, query)
    for i in range(len(waiting) // 2 - 1, -1, -1):
        _sift(waiting, nearness, first, i, len(waiting))
    found, visited = np.int64(0), np.int64(0)
    for size in range(len(waiting), 0, -1):
        nearest = waiting[0]
        start, stop = index.lists[nearest], min(index.lists[nearest + 1], end)
        found = _scan(index.vectors, query, start, stop, found, entries, similarities)
        visited += stop - start
        if visited >= wanted and found == len(entries):
            break
        waiting[0] = waiting[size - 1]
        _sift(waiting, nearness, first, 0, size - 1)
    return found


@leaf_kernel
def _sift(waiting, nearness, first, place, size):
    """Restore a max-heap of lists: move the one at a place down until no nearer list is below it."""
    moved = waiting[place]
    while True:
        below = 2 * place + 1
        if below + 1 < size and nearness[waiting[below + 1] - first] > nearness[waiting[below] - first]:
            below += 1
        if below >= size or nearness[waiting[below] - first] <= nearness[moved - first]:
            break
        waiting[place] = waiting[below]
        place = below
    if size > 0:
        waiting[place] = moved


@leaf_kernel
def _squares(query):
    total = 0.0
    for i in range(len(query)):
        total += np.float64(query[i]) * np.float64(query[i])
    return total


@leaf_kernel
def _scan(vectors, query, start, stop, found, entries, similarities):
    """Compare a query with a range of entries and keep the nearest; return how many there are."""
    least = similarities[found - 1] if found == len(entries) else np.float32(-np.inf)
    for entry in range(start, stop):
        similarity = half_dot(vectors, entry, query)
        if similarity >= least:
            found = _insert(entry, similarity, found, entries, similarities)
            if found == len(entries):
                least = similarities[found - 1]
    return found


@leaf_kernel
def _insert(entry, similarity, found, entries, similarities):
    """Insert an entry into the sorted nearest ones if it is near enough; return their number."""
    place = found
    while place > 0 and (
        similarity > similarities[place - 1]
        or (similarity == similarities[place - 1] and entry < entries[place - 1])
    ):
        place -= 1
    if place == len(entries):
        return found
    found = min(found + 1, len(entries))
    for i in range(found - 1, place, -1):
        entries[i] = entries[i - 1]
        similarities[i] = similarities[i - 1]
    entries[place] = entry
    similarities[place] = similarity
    return found


@reordering_kernel
def dot(rows, row, query):
    """Return the dot product of a row of float32 [any, dims] and a query, float32 [dims]."""
    total = np.float32(0.0)
    for i in range(len(query)):
        total += rows[row, i] * query[i]
    return total


@reordering_kernel
def half_dot(rows, row, query):
    """Return the same for rows of float16, as their bits, uint16 [any, dims]."""
    total = np.float32(0.0)
    for i in range(len(query)):
        bits = np.int32(np.int32(np.int16(rows[row, i])) << _FRACTION & _EXPONENT)
        total += bits.view(np.float32) * _SCALE * query[i]
    return total


@kernel
def project(weights, bias, states):
    """Return float32 [batch, dims]: weights [dims, hidden_size] @ state + bias [dims] for states [batch, hidden_size].

    All are float32. A state gives the same numbers in every batch; one with a value that is not finite, no finite one.
    """
    queries = np.empty((len(states), len(bias)), np.float32)
    for dim in range(len(bias)):
        for row in range(len(states)):
            queries[row, dim] = dot(weights, dim, states[row]) + bias[dim]
    return queries
