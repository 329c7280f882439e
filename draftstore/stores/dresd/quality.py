"""Retrieval quality of a dense store, for its manifest and for benchmarks."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.projection import unit
from draftstore.errors import DraftstoreError
from draftstore.stores.dresd.kernels.nearest import PROBING, DenseIndex, search, search_exactly
from draftstore.stores.dresd.kernels.quantised import restore

TIE = 1e-6
"""Tolerance for equal cosines: rounding of a float32 sum depends on its position in a block."""
_ROWS = 4_096
_QUERIES = 512

Ties = Literal["best", "any"]


def reciprocal_ranks(
    index: DenseIndex, queries: NDArray[np.float32], entries: NDArray[np.int64], ties: Ties = "best"
) -> NDArray[np.float64]:
    """Return the reciprocal rank of each entry when queried with its own state.

    The rank is among all entries, whatever their first tokens: one plus the number of nearer entries. Entries with
    equal vectors are ties; common prefixes of texts, such as chat templates, cause many.

    Args:
        index: arrays of the store.
        queries: float32 [n, dims], projected, unquantised states of entries; of any length.
        entries: int64 [n], numbers of these entries.
        ties: `best`: ties do not count; `any`: the mean over all orders of the ties.

    Returns:
        float64 [n]; 0 for zero vectors and those with NaN.

    Raises:
        DraftstoreError: shapes do not match, or unknown entries.
    """
    total, dims = index.vectors.shape
    if queries.shape != (len(entries), dims):
        raise DraftstoreError(f"queries of shape {queries.shape}, expected ({len(entries)}, {dims})")
    if len(entries) and not 0 <= entries.min() <= entries.max() < total:
        raise DraftstoreError(f"entries {entries.min():,} to {entries.max():,}, the store has {total:,}")
    ranks = np.empty(len(entries), np.float64)
    for first in range(0, len(entries), _QUERIES):
        some = slice(first, first + _QUERIES)
        nearer, equal = _count(index, unit(queries[some].astype(np.float32, copy=False)), entries[some])
        last = nearer + (equal if ties == "any" else np.minimum(equal, 1))
        ranks[some] = [_mean(1.0 / np.arange(a + 1, b + 1)) for a, b in zip(nearer, last, strict=True)]
    return np.nan_to_num(ranks)


def mean_reciprocal_rank(
    index: DenseIndex, queries: NDArray[np.float32], entries: NDArray[np.int64], ties: Ties = "best"
) -> float:
    """Return the mean of `reciprocal_ranks`; NaN without queries."""
    return _mean(reciprocal_ranks(index, queries, entries, ties))


def recall(
    index: DenseIndex,
    queries: NDArray[np.float32],
    tokens: NDArray[np.int32],
    k: int = 10,
    probing: float = PROBING,
) -> float:
    """Return the recall of `search` for the k nearest entries of a group, averaged over queries.

    A found entry counts if it is as near as the k-th of `search_exactly`. Queries without neighbours are skipped.

    Args:
        index: arrays of the store.
        queries: float32 [n, dims], of any length.
        tokens: int32 [n], first tokens.
        k: number of neighbours; fewer in smaller groups.
        probing: see `search`.

    Returns:
        Recall in [0, 1]; NaN if no query has neighbours.

    Raises:
        DraftstoreError: see `search`.
    """
    shares = []
    for first in range(0, len(tokens), _QUERIES):
        some = slice(first, first + _QUERIES)
        exact = search_exactly(index, queries[some], tokens[some], k)
        found = search(index, queries[some], tokens[some], k, probing)
        expected = (exact.entries >= 0).sum(axis=1)
        asked = expected > 0
        least = exact.similarities[asked, expected[asked] - 1]
        hits = ((found.entries >= 0)[asked] & (found.similarities[asked] >= least[:, None] - TIE)).sum(axis=1)
        shares.append(hits / expected[asked])
    return _mean(np.concatenate([np.empty(0), *shares]))


def figures(
    index: DenseIndex,
    tokens: NDArray[Any],
    places: NDArray[np.int64],
    queries: NDArray[np.float32],
    probing: float = PROBING,
) -> dict[str, int | float]:
    """Return the quality figures of a store's manifest.

    Args:
        index: arrays of the store.
        tokens: unsigned [tokens], its corpus.
        places: int64 [n], starts of some entries' continuations in the corpus; entries that are not in the store are
            skipped.
        queries: float32 [n, dims], projected, unquantised states of these entries.
        probing: see `draftstore.stores.dresd.kernels.nearest.search`.

    Returns:
        `queries`, their number, `mean_reciprocal_rank`, `mean_reciprocal_rank_ties` with ties in any order, and
        `recall_at_10`, to six digits.
    """
    firsts = tokens[places - 1].astype(np.int32)
    found: list[tuple[int, int]] = []
    for row, token in enumerate(firsts.tolist()):
        start, stop = index.groups[token : token + 2].tolist()
        found += [
            (row, start + entry)
            for entry in np.flatnonzero(index.positions[start:stop] == places[row]).tolist()
        ]
    rows, entries = np.array(found, np.int64).reshape(-1, 2).T
    return {
        "queries": len(rows),
        "mean_reciprocal_rank": round(mean_reciprocal_rank(index, queries[rows], entries), 6),
        "mean_reciprocal_rank_ties": round(mean_reciprocal_rank(index, queries[rows], entries, "any"), 6),
        "recall_at_10": round(recall(index, queries[rows], firsts[rows], 10, probing), 6),
    }


def _count(
    index: DenseIndex, queries: NDArray[np.float32], entries: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the entries nearer to each query than its own, and those equally near.

    The latter include the entry itself; there are none if the query has NaN.
    """
    own = np.einsum("ij,ij->i", queries, restore(index.vectors[entries]))[:, None]
    nearer, equal = np.zeros((2, len(entries)), np.int64)
    for first in range(0, len(index.vectors), _ROWS):
        similarities = queries @ restore(index.vectors[first : first + _ROWS]).T
        more = np.count_nonzero(similarities > own + TIE, axis=1)
        nearer += more
        equal += np.count_nonzero(similarities >= own - TIE, axis=1) - more
    return nearer, equal


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
