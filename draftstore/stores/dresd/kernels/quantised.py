"""Quantisation of unit vectors to two bytes or one byte per dimension.

`float16` has about three decimal digits. `int8` stores only a vector's direction: multiples of a step (not stored) of
1/127 of the vector's largest absolute value. As all vectors have unit length, `restore` normalises codes, and
`draftstore.stores.dresd.kernels.nearest` divides by their norm, so that rounding does not affect the length.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("float16", "int8")
"""Names of the storage types of vectors."""

LARGEST = 127
"""Largest code of int8; -128 is not used, so that codes are symmetric."""

SMALLEST = 2.0**-14
"""Smallest normal float16; smaller values become zero, so that no kernel sees subnormal numbers."""


def vector_dtype(name: str) -> np.dtype[Any]:
    """Return the stored type of vectors, little-endian."""
    return np.dtype(name).newbyteorder("<")


def quantise(vectors: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Return vectors float32 [any, dims], finite and of unit length, as float16 or int8 [any, dims]."""
    dtype = vector_dtype(name)
    if dtype.kind == "f":
        return np.where(np.abs(vectors) < SMALLEST, 0.0, vectors).astype(dtype)
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=SMALLEST)
    codes: NDArray[Any] = np.rint(vectors * (LARGEST / largest)).astype(dtype)
    return codes


def restore(codes: NDArray[Any]) -> NDArray[np.float32]:
    """Return codes [any, dims], float16, uint16 (float16 bits) or int8, as float32 [any, dims]."""
    if codes.dtype.kind == "i":
        directions: NDArray[np.float32] = codes.astype(np.float32)
        lengths = np.linalg.norm(directions, axis=-1, keepdims=True)
        np.divide(directions, lengths, out=directions, where=lengths > 0.0)
        return directions
    numbers: NDArray[np.float32] = (codes.view(np.float16) if codes.dtype.kind == "u" else codes).astype(
        np.float32
    )
    return numbers
