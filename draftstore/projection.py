"""Hidden states as short queries: z-score, then PCA, as one linear map; what dense stores are keyed by.

    query = projection.apply(hidden)       # float32 [dims] of float32 [hidden_size]

A dense store keeps the unit vectors of its entries in this space, and compares by cosine: `unit` is the last step of
both sides. "DReSD: Dense Retrieval for Speculative Decoding", ACL Findings 2025, section 3.
"""

import dataclasses
import hashlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """The map of a dense store: `weights @ hidden + bias`.

    Attributes:
        weights: float32 [dims, hidden_size], principal components over standard deviations.
        bias: float32 [dims], what brings the mean to zero.
    """

    weights: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            DraftstoreError: they do not fit, or a value is not finite.
        """
        if self.weights.ndim != 2 or self.bias.shape != self.weights.shape[:1]:
            raise DraftstoreError(
                f"a projection of weights {self.weights.shape} and bias {self.bias.shape}: expected [dims, "
                "hidden_size] and [dims]"
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.bias).all()):
            raise DraftstoreError("a projection with values that are not finite: build its store again")

    @property
    def dims(self) -> int:
        """Numbers of a query."""
        return self.weights.shape[0]

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state."""
        return self.weights.shape[1]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its values: the identity of the space that queries lie in."""
        head = np.array([self.dims, self.hidden_size], "<i8").tobytes()
        return hashlib.sha256(head + self.to_bytes()).hexdigest()

    def apply(self, states: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """Project hidden states; of any length, see `unit`.

        Args:
            states: float [..., hidden_size].

        Returns:
            float32 [..., dims].

        Raises:
            DraftstoreError: states of another size.
        """
        if states.shape[-1:] != (self.hidden_size,):
            raise DraftstoreError(
                f"hidden states of {states.shape[-1] if states.ndim else 0} numbers, expected {self.hidden_size}: is "
                "the store of this model?"
            )
        projected: NDArray[np.float32] = states.astype(np.float32, copy=False) @ self.weights.T + self.bias
        return projected

    def to_bytes(self) -> bytes:
        """Return the weights row by row, then the bias: float32, little-endian."""
        return self.weights.astype("<f4").tobytes() + self.bias.astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, dims: int) -> "Projection":
        """Read what `to_bytes` wrote.

        Raises:
            DraftstoreError: not that of `dims` rows, or a value is not finite.
        """
        if dims < 1 or len(data) % (4 * dims) or len(data) < 8 * dims:
            raise DraftstoreError(f"{len(data):,} bytes are no projection to {dims} dimensions")
        values = np.frombuffer(data, "<f4").astype(np.float32)
        return cls(values[:-dims].reshape(dims, -1), values[-dims:])


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors [..., dims] at length one; those without a length become NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return scaled
