import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.stores.dresd.kernels.clusters import cluster
from draftstore.stores.dresd.projection import unit


def directions(count: int, dims: int, seed: int) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


@given(
    count=st.integers(1, 300),
    dims=st.sampled_from([1, 2, 8, 64]),
    different=st.integers(1, 300),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 9),
)
def test_every_vector_is_in_the_list_of_its_nearest_centroid(
    count: int, dims: int, different: int, share: float, seed: int
) -> None:
    vectors = directions(different, dims, seed)[np.arange(count) % different]
    lists = 1 + int(share * (count - 1))
    centroids, assignment = cluster(vectors, lists, seed)
    assert centroids.dtype == np.float32
    assert centroids.shape == (lists, dims)
    assert assignment.dtype == np.int32
    assert assignment.shape == (count,)
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(lists), abs=1e-5)
    similarities = vectors @ centroids.T
    assert (similarities[np.arange(count), assignment] >= similarities.max(axis=1) - 1e-5).all()
