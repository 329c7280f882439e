import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.stores.dresd.kernels.projecting import project
from tests import reference
from tests.fakes.dense_stores import make_projection


@given(size=st.integers(1, 70), dims=st.integers(1, 9), batch=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_projection_adds_up_in_a_fixed_order(size: int, dims: int, batch: int, seed: int) -> None:
    projection = make_projection(size, dims, seed)
    states = np.random.default_rng(seed).standard_normal((batch, size)).astype(np.float16)
    found = project(projection.weights, projection.bias, states.astype(np.float32))
    expected = [reference.projected(projection, state) for state in states]
    np.testing.assert_array_equal(found, expected, strict=True)
    np.testing.assert_allclose(found, projection.apply(states), rtol=1e-4, atol=1e-4)
