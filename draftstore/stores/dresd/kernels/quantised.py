"""Unit vectors in two bytes or one a number, as dense stores keep them.

    codes = quantise(vectors, "int8")
    restore(codes)                        # nearly the vectors

`float16` keeps about three digits of every number. `int8` keeps a vector's direction alone: multiples of a step that no
file names, the 127th part of the vector's largest number. As all vectors are of unit length, `restore` scales codes
to that, and `draftstore.stores.dresd.kernels.nearest` divides by theirs; what rounding adds to the length of a
vector does no harm then.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError

DTYPES = ("float16", "int8")
"""Names of what vectors may be kept as."""

MOST = 127
"""Largest code of int8; -128 is not used, so that codes and their negatives are alike."""

SMALLEST = 2.0**-14
"""The least number that float16 keeps; what is smaller becomes zero, so that no kernel meets subnormal numbers."""


def vector_dtype(name: str) -> np.dtype[Any]:
    """Return the type of the numbers of a vector, little-endian.

    Raises:
        DraftstoreError: no such name.
    """
    if name not in DTYPES:
        raise DraftstoreError(f"vectors of type {name!r}: expected one of {', '.join(DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def quantise(vectors: NDArray[np.float32], name: str) -> NDArray[Any]:
    """Return vectors as a store keeps them.

    Args:
        vectors: float32 [any, dims], of unit length and finite.
        name: see `DTYPES`.

    Returns:
        float16 or int8 [any, dims].

    Raises:
        DraftstoreError: no such name.
    """
    dtype = vector_dtype(name)
    if dtype.kind == "f":
        return np.where(np.abs(vectors) < SMALLEST, 0.0, vectors).astype(dtype)
    largest = np.abs(vectors).max(axis=-1, keepdims=True, initial=SMALLEST)
    codes: NDArray[Any] = np.rint(vectors * (MOST / largest)).astype(dtype)
    return codes


def restore(codes: NDArray[Any]) -> NDArray[np.float32]:
    """Return what codes stand for.

    Args:
        codes: [any, dims], float16, uint16, the bits of float16 numbers, or int8.

    Returns:
        float32 [any, dims].
    """
    if codes.dtype.kind == "i":
        directions: NDArray[np.float32] = codes.astype(np.float32)
        lengths = np.linalg.norm(directions, axis=-1, keepdims=True)
        np.divide(directions, lengths, out=directions, where=lengths > 0.0)
        return directions
    numbers: NDArray[np.float32] = (codes.view(np.float16) if codes.dtype.kind == "u" else codes).astype(
        np.float32
    )
    return numbers
