"""Projection of hidden states to short queries for dense stores: z-score, then PCA, as one linear map.

    projection, explained = fit(states, dims=64)
    vectors = unit(projection.apply(states))

A dense store holds the unit vectors of its entries in this space, and compares by cosine. Queries are projected by
`draftstore.stores.dresd.kernels.nearest`.
"DReSD: Dense Retrieval for Speculative Decoding", ACL Findings 2025, section 3.
"""

import dataclasses
import hashlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import BuildError, DraftstoreError, counted
from draftstore.storage.report import OnProgress, ignore

PART = 4096
"""States per part: products within a part are summed in float32, parts in float64."""


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """The linear map of a dense store: `weights @ hidden + bias`, float32 [dims, hidden_size] and [dims].

    The weights are principal components divided by standard deviations; the bias moves the mean to zero.
    """

    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        if not (np.isfinite(self.weights).all() and np.isfinite(self.bias).all()):
            raise DraftstoreError("a projection with values that are not finite: build its store again")

    @property
    def dims(self) -> int:
        """Dimensions of a query."""
        return int(self.weights.shape[0])

    @property
    def hidden_size(self) -> int:
        """Dimensions of a hidden state."""
        return int(self.weights.shape[1])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its values, recorded in the manifest."""
        head = np.array([self.dims, self.hidden_size], "<i8").tobytes()
        return hashlib.sha256(head + self.to_bytes()).hexdigest()

    def apply(self, states: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Project hidden states, float [..., hidden_size], to float32 [..., dims]; `unit` normalises them."""
        projected: NDArray[np.float32] = states.astype(np.float32, copy=False) @ self.weights.T + self.bias
        return projected

    def to_bytes(self) -> bytes:
        """Return the weights row by row, then the bias: float32, little-endian."""
        return self.weights.astype("<f4").tobytes() + self.bias.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dims: int) -> "Projection":
        """Decode `to_bytes`; DraftstoreError if the size does not match `dims`, or a value is not finite."""
        if dims < 1 or len(data) % (4 * dims) or len(data) < 8 * dims:
            raise DraftstoreError(f"{len(data):,} bytes are not a projection to {dims} dimensions")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        return cls(values[:-dims].reshape(dims, -1), values[-dims:])


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise vectors [..., dims]; zero vectors become NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled


def fit(
    states: NDArray[np.floating[Any]], dims: int, on_progress: OnProgress = ignore
) -> tuple[Projection, float]:
    """Fit z-score and PCA to states, float [n, size], as one map; return it and the share of explained variance.

    States that are not finite are skipped. The largest value of each component is positive, so that signs are
    deterministic. A dimension that is constant over all states gets no weight. Raises BuildError unless there are more
    than `dims` states.
    """
    size = states.shape[1]
    count, mean, covariance = moments(states, on_progress)
    if count <= dims:
        raise BuildError(
            f"{counted(count, 'hidden state')} for {counted(dims, 'dimension')}: give more text, or fewer dimensions",
            "dims",
        )
    deviation = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
    scale = np.divide(1.0, deviation, out=np.zeros(size), where=deviation > 0.0)
    values, vectors = np.linalg.eigh(covariance * scale * scale[:, None])
    components = vectors[:, ::-1][:, :dims].T  # eigh returns ascending eigenvalues
    largest = components[np.arange(dims), np.abs(components).argmax(axis=1)]
    weights = components * np.sign(largest)[:, None] * scale
    bias = -weights @ mean
    explained = float(values[::-1][:dims].sum() / max(values.sum(), np.finfo(np.float64).tiny))
    return Projection(weights.astype(np.float32), bias.astype(np.float32)), explained


def moments(
    states: NDArray[np.floating[Any]], on_progress: OnProgress = ignore
) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Return the number of finite states, their mean [size] and their population covariance [size, size].

    States are centred on the mean of the first part, so that large means do not swamp small variances.
    """
    count, size = 0, states.shape[1]
    origin, sums, products = np.zeros(size), np.zeros(size), np.zeros((size, size))
    for start in range(0, len(states), PART):
        on_progress(start, len(states))
        part = states[start : start + PART]
        part = part[np.isfinite(part).all(axis=1)].astype(np.float64)
        if count == 0 < len(part):
            origin = part.mean(axis=0)
        part -= origin
        count += len(part)
        sums += part.sum(axis=0)
        single = part.astype(np.float32)
        products += single.T @ single
    on_progress(len(states), len(states))
    offset = sums / max(count, 1)
    return count, origin + offset, products / max(count, 1) - np.outer(offset, offset)
