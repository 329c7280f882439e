import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.stores.dresd.kernels.cosines import project
from tests.fakes.dense_stores import make_projection


@given(size=st.integers(1, 70), dims=st.integers(1, 9), batch=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_state_gives_the_same_query_in_every_batch(size: int, dims: int, batch: int, seed: int) -> None:
    projection = make_projection(size, dims, seed)
    states = np.random.default_rng(seed).standard_normal((batch, size)).astype(np.float16)
    found = project(projection.weights, projection.bias, states.astype(np.float32))
    np.testing.assert_allclose(found, projection.apply(states), rtol=1e-4, atol=1e-4)
    for state, query in zip(states.astype(np.float32), found, strict=True):
        [alone] = project(projection.weights, projection.bias, state[None])
        np.testing.assert_array_equal(alone, query, strict=True)
