import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.stores.dresd.kernels.quantised import (
    DTYPES,
    SMALLEST,
    quantise,
    restore,
    vector_dtype,
)
from draftstore.stores.dresd.projection import unit


def directions(count: int, dims: int, seed: int) -> NDArray[np.float32]:
    """Return unit vectors, the later numbers of which are smaller, as those of a projection are."""
    numbers = np.random.default_rng(seed).standard_normal((count, dims)) / np.arange(1, dims + 1) ** 0.3
    return unit(numbers.astype(np.float32))


@pytest.mark.parametrize(("name", "least"), [("float16", 1.0 - 1e-6), ("int8", 1.0 - 1.5e-4)])
@given(dims=st.sampled_from([1, 2, 7, 64, 100]), seed=st.integers(0, 99))
def test_codes_keep_directions(name: str, least: float, dims: int, seed: int) -> None:
    vectors = directions(50, dims, seed)
    restored = restore(quantise(vectors, name))
    assert restored.dtype == np.float32
    assert restored.shape == vectors.shape
    assert np.abs(np.linalg.norm(restored, axis=1) - 1.0).max() < 1e-3
    assert np.einsum("ij,ij->i", unit(restored), vectors).min() > least


def test_float16_holds_no_subnormal_numbers() -> None:
    numbers = np.array([[SMALLEST, -SMALLEST, SMALLEST * 0.99, -1e-7, 0.0, 0.5]], np.float32)
    assert restore(quantise(numbers, "float16")).tolist() == [[SMALLEST, -SMALLEST, 0.0, 0.0, 0.0, 0.5]]


def test_types_are_little_endian() -> None:
    assert [vector_dtype(name).str for name in DTYPES] == ["<f2", "|i1"]
