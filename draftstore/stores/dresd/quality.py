"""Retrieval quality of a dense store, for its manifest."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.stores.dresd.kernels.nearest import ALL, PROBING, DenseIndex, search
from draftstore.stores.dresd.projection import unit

NEIGHBOURS = 10
TIE = 1e-6
"""Tolerance for equal cosines: rounding of a float32 sum depends on its position in a block."""
_ROWS = 4_096


def figures(
    index: DenseIndex,
    tokens: NDArray[Any],
    places: NDArray[np.int64],
    queries: NDArray[np.float32],
    probing: float = PROBING,
) -> dict[str, int | float]:
    """Return how well some entries of a store are found by their own states, to six digits.

    The rank of an entry is one plus the number of nearer entries in the whole store. Entries with equal vectors are
    ties; common prefixes of texts, such as chat templates, cause many: `mean_reciprocal_rank` does not count them,
    `mean_reciprocal_rank_ties` is the mean over all their orders. `recall_at_10` is that of `search` among the entries
    with the same first token; an entry as near as the tenth counts as found.

    Args:
        index: arrays of the store.
        tokens: unsigned [tokens], its corpus.
        places: int64 [n], starts of some entries' continuations; those that are not in the store are skipped.
        queries: float32 [n, dims], projected states of these entries, before rounding.
        probing: see `draftstore.stores.dresd.kernels.nearest.search`.
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
    nearer, last = _ranks(index, unit(queries[rows]), entries)
    ties = [_mean(1.0 / np.arange(a + 1, b + 1)) for a, b in zip(nearer, last, strict=True)]
    return {
        "queries": len(rows),
        "mean_reciprocal_rank": round(_mean(1.0 / (nearer + 1)), 6),
        "mean_reciprocal_rank_ties": round(_mean(np.array(ties)), 6),
        "recall_at_10": round(_recall(index, queries[rows], firsts[rows], probing), 6),
    }


def _recall(
    index: DenseIndex, queries: NDArray[np.float32], tokens: NDArray[np.int32], probing: float
) -> float:
    """Return the mean share of the nearest entries of each query's group, float32 [n, dims], that a search finds."""
    exact = search(index, queries, tokens, NEIGHBOURS, ALL)
    found = search(index, queries, tokens, NEIGHBOURS, probing)
    expected = (exact.entries >= 0).sum(axis=1)
    least = exact.similarities[np.arange(len(expected)), expected - 1]
    hits = ((found.entries >= 0) & (found.similarities >= least[:, None] - TIE)).sum(axis=1)
    return _mean(hits / expected)


def _ranks(
    index: DenseIndex, queries: NDArray[np.float32], entries: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many entries are nearer to each query [n, dims] than its own, and how many at least as near."""
    own = np.einsum("ij,ij->i", queries, _vectors(index, entries))[:, None]
    nearer, last = np.zeros((2, len(entries)), np.int64)
    for first in range(0, len(index.vectors), _ROWS):
        similarities = queries @ _vectors(index, slice(first, first + _ROWS)).T
        nearer += np.count_nonzero(similarities > own + TIE, axis=1)
        last += np.count_nonzero(similarities >= own - TIE, axis=1)
    return nearer, last


def _vectors(index: DenseIndex, rows: Any) -> NDArray[np.float32]:
    vectors: NDArray[np.float32] = index.vectors[rows].view(np.float16).astype(np.float32)
    return vectors


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
