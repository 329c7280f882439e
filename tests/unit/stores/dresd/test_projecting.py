import numpy as np
import pytest
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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5, 40])
def test_a_state_that_is_not_finite_gives_no_finite_number(bad: float, size: int) -> None:
    projection = make_projection(size, 4)
    projection.weights[1] = 0.0
    for place in (0, size - 1):
        states = np.ones((2, size), np.float32)
        states[1, place] = bad
        found = project(projection.weights, projection.bias, states)
        assert np.isfinite(found[0]).all()
        assert not np.isfinite(found[1]).any()
