"""Inverted lists of near entries by spherical k-means, for the large groups of a dense store (see `nearest`)."""

import numpy as np
from numpy.typing import NDArray

from draftstore.stores.dresd.kernels.nearest import LARGE

SAMPLE = 64
"""Sampled vectors per list for computing centroids; more hardly improve them."""
ROUNDS = 10
BLOCK = 4096
"""Vectors compared with all centroids at a time."""


def lists_for(entries: int) -> int:
    """Return the number of lists of a group: none, or about as many as a list has entries."""
    return round(entries**0.5) if entries >= LARGE else 0


def cluster(
    vectors: NDArray[np.float32], lists: int, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Cluster vectors into lists by spherical k-means on a sample.

    Args:
        vectors: float32 [n, dims], of unit length, n at least `lists`.
        lists: number of lists, at least one; some may stay empty.
        seed: seed for the choice of initial centroids.

    Returns:
        Centroids float32 [lists, dims], of unit length, and the list of each vector, int32 [n].
    """
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(vectors), min(len(vectors), SAMPLE * lists), replace=False)
    sample = vectors[np.sort(chosen)]
    centroids = sample[np.sort(rng.choice(len(sample), lists, replace=False))]
    for _ in range(ROUNDS):
        centroids = _means(sample, *_nearest(sample, centroids), centroids)
    return centroids, _nearest(vectors, centroids)[0]


def _nearest(
    vectors: NDArray[np.float32], centroids: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the nearest centroid of each vector, int32 [n], and the similarity to it, float32 [n]."""
    assignment = np.empty(len(vectors), np.int32)
    similarities = np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK] @ centroids.T
        nearest = block.argmax(axis=1)
        assignment[start : start + BLOCK] = nearest
        similarities[start : start + BLOCK] = np.take_along_axis(block, nearest[:, None], axis=1)[:, 0]
    return assignment, similarities


def _means(
    vectors: NDArray[np.float32],
    assignment: NDArray[np.int32],
    similarities: NDArray[np.float32],
    centroids: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Return the normalised sums of the lists; the vectors that fit worst become centroids of empty lists."""
    order = np.argsort(assignment, kind="stable")
    starts = np.searchsorted(assignment[order], np.arange(len(centroids)))
    sizes = np.diff(starts, append=len(vectors))
    filled = sizes > 0
    sums = np.add.reduceat(vectors[order], starts[filled], axis=0, dtype=np.float32)
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    means = centroids.copy()
    means[filled] = np.divide(sums, lengths, out=means[filled], where=lengths > 0.0)
    means[~filled] = vectors[np.argsort(similarities, kind="stable")[: np.count_nonzero(~filled)]]
    return means
