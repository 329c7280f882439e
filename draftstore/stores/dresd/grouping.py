"""The arrays of a dense store: the vectors of a corpus grouped by first token, large groups cut into lists.

The lists hold near entries, found by spherical k-means (see `draftstore.stores.dresd.kernels.nearest`).

`draftstore.stores.dresd.store` describes the files. Memory: about 30 bytes per entry, and the vectors of the largest
group as float32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.storage.report import OnProgress
from draftstore.stores.dresd.kernels.nearest import LARGE
from draftstore.stores.dresd.kernels.passages import BEHIND, Passages

PART = 1 << 14
"""Vectors written at a time."""
SMALLEST = 2.0**-14
"""Smallest normal float16; smaller values become zero, so that no kernel sees subnormal numbers."""
SAMPLE = 64
"""Sampled vectors per list for computing centroids; more hardly improve them."""
ROUNDS = 10
BLOCK = 4096
"""Vectors compared with all centroids at a time."""


def group_entries(
    store: Path,
    tokens: NDArray[Any],
    passages: Passages,
    vectors: NDArray[np.float16],
    vocab_size: int,
    on_progress: OnProgress,
) -> tuple[int, int]:
    """Write the arrays of a store's entries; return the number of entries and of lists.

    `vectors` are float16 [entries, dims] in corpus order, of unit length or NaN, which are skipped.
    """
    finite = _finite(vectors)
    wide = len(tokens) >= 1 << 32
    blocks = range(len(passages.blocks) - 1)
    places = np.concatenate([passages.places(block).astype("<u8" if wide else "<u4") for block in blocks])
    firsts = tokens[places[finite] - (BEHIND - 1)]
    order = finite[np.argsort(firsts, kind="stable")]
    groups = np.append(0, np.cumsum(np.bincount(firsts, minlength=vocab_size)))
    group_lists = np.append(0, np.cumsum([lists_for(size) for size in np.diff(groups).tolist()]))
    list_starts, centroids = [], []
    with (
        (store / "vectors.bin").open("wb") as vector_file,
        (store / "positions.bin").open("wb") as place_file,
    ):
        for start, stop, token in _runs(groups, group_lists):
            on_progress(start, len(order))
            rows = order[start:stop]
            found = vectors[rows].astype(np.float32)
            arranged = np.arange(len(rows))
            if token is not None:
                arranged, starts, centres = _cut(found, token)
                list_starts.append(start + starts)
                centroids.append(centres)
            for first in range(0, len(rows), PART):
                part = arranged[first : first + PART]
                vector_file.write(to_half(found[part]).tobytes())
                place_file.write(places[rows[part]].tobytes())
    on_progress(len(order), len(order))
    tables = {
        "groups.bin": (groups, "<i8"),
        "group_lists.bin": (group_lists, "<i4"),
        "lists.bin": (np.concatenate([*list_starts, [len(order)]]), "<i8"),
        "centroids.bin": (np.concatenate([np.empty((0, vectors.shape[1])), *centroids]), "<f4"),
    }
    for name, (table, kind) in tables.items():
        (store / name).write_bytes(table.astype(kind).tobytes())
    return len(order), int(group_lists[-1])


def to_half(vectors: NDArray[np.float32]) -> NDArray[np.float16]:
    """Return vectors as they are stored, float16, little-endian, without subnormal numbers."""
    return np.where(np.abs(vectors) < SMALLEST, 0.0, vectors).astype("<f2")


def _cut(
    vectors: NDArray[np.float32], token: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Cut a large group into lists; return its entries in list order, where each list starts, and the centroids."""
    lists = lists_for(len(vectors))
    centroids, assignment = cluster(vectors, lists, seed=token)
    order = np.argsort(assignment, kind="stable")
    return order, np.searchsorted(assignment[order], np.arange(lists)), centroids


def _finite(vectors: NDArray[np.float16]) -> NDArray[np.int64]:
    parts = range(0, len(vectors), PART)
    finite = [np.isfinite(vectors[start : start + PART]).all(axis=1) for start in parts]
    return np.flatnonzero(np.concatenate(finite))


def _runs(groups: NDArray[np.int64], group_lists: NDArray[np.int64]) -> Iterator[tuple[int, int, int | None]]:
    """Yield start and end of all entries in order: each large group whole, with its token, others in parts."""
    place = 0
    for token in [*np.flatnonzero(np.diff(group_lists)).tolist(), len(groups) - 1]:
        start = int(groups[token])
        for begin in range(place, start, PART):
            yield begin, min(begin + PART, start), None
        if token < len(groups) - 1:
            place = int(groups[token + 1])
            yield start, place, token


def lists_for(entries: int) -> int:
    """Return the number of lists of a group: none, or about as many as a list has entries."""
    return round(entries**0.5) if entries >= LARGE else 0


def cluster(
    vectors: NDArray[np.float32], lists: int, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Cluster vectors, float32 [n, dims], of unit length, into at most n lists by spherical k-means on a sample.

    Returns centroids float32 [lists, dims], of unit length, and the list of each vector, int32 [n]; some lists may be
    empty. `seed` chooses the initial centroids.
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
