from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from draftstore.errors import DraftstoreError
from draftstore.stores.dresd import projection as projection_module
from draftstore.stores.dresd.projection import Moments, Projection, fit


def states_of(count: int, size: int, seed: int = 0) -> NDArray[np.float32]:
    """Return states of which some numbers are large, some small, and none independent."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, size)) * np.linspace(1, 3, size) @ rng.standard_normal((size, size))
    states: NDArray[np.float32] = (
        mixed * 10.0 ** rng.uniform(-3, 3, size) + rng.uniform(-50, 50, size)
    ).astype(np.float32)
    return states


def fitted(states: NDArray[Any], dims: int) -> tuple[Projection, float]:
    moments = Moments(states.shape[1])
    moments.add(states)
    return fit(moments, dims)


@given(count=st.integers(30, 300), size=st.integers(2, 24), seed=st.integers(0, 99))
def test_it_is_that_of_scikit_learn(count: int, size: int, seed: int) -> None:
    states = states_of(count, size, seed)
    dims = max(size // 2, 1)
    projection, explained = fitted(states, dims)
    scaled = StandardScaler().fit_transform(states.astype(np.float64))
    pca = PCA(dims, svd_solver="full").fit(scaled)
    expected = pca.transform(scaled)
    found = projection.apply(states)
    signs = np.sign((found * expected).sum(axis=0))
    assert np.abs(found - expected * signs).max() < 0.02 * np.abs(expected).max()
    assert explained == pytest.approx(float(pca.explained_variance_ratio_.sum()), abs=1e-4)


def test_parts_are_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(500, 10)
    whole = Moments(10)
    whole.add(states)
    monkeypatch.setattr(projection_module, "PART", 64)
    parts = Moments(10)
    for start in range(0, 500, 37):
        parts.add(states[start : start + 37])
    assert parts.count == whole.count == 500
    exact = states.astype(np.float64)
    scale = exact.std(axis=0)
    for moments in (whole, parts):
        assert np.allclose((moments.mean() - exact.mean(axis=0)) / scale, 0, atol=1e-6)
        expected = np.cov(exact.T, bias=True)
        assert np.allclose((moments.covariance() - expected) / np.outer(scale, scale), 0, atol=1e-5)


def test_states_that_are_not_finite_are_skipped() -> None:
    states = states_of(100, 6)
    broken = np.insert(states, [0, 5, 50], np.nan, axis=0)
    broken[6] = np.inf
    moments = Moments(6)
    moments.add(broken)
    assert moments.count == 100
    moments.add(np.full((3, 6), np.nan))
    projection, _ = fit(moments, 3)
    assert projection.to_bytes() == fitted(states, 3)[0].to_bytes()


def test_numbers_that_never_change_get_no_weight() -> None:
    states = states_of(100, 6)
    states[:, 1], states[:, 4] = 0.1, 0.0
    projection, explained = fitted(states, 4)
    assert (projection.weights[:, [1, 4]] == 0).all()
    assert np.isfinite(projection.weights).all()
    assert explained == pytest.approx(1, abs=1e-6)
    equal, nothing = fitted(np.ones((9, 3), np.float32), 2)
    assert (equal.weights == 0).all()
    assert nothing == 0


def test_invalid_projections_are_refused() -> None:
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(DraftstoreError, match=r"weights \(2, 3\) and bias \(3,\): expected"):
        Projection(ones, np.ones(3, np.float32))
    with pytest.raises(DraftstoreError, match="not finite: build its store again"):
        Projection(ones, np.array([1, np.nan], np.float32))
    with pytest.raises(
        DraftstoreError, match="hidden states of 4 numbers, expected 3: use a store of this model"
    ):
        Projection(ones, np.ones(2, np.float32)).apply(np.ones((5, 4), np.float32))
