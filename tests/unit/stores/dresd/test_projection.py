import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from draftstore.errors import DraftstoreError
from draftstore.stores.dresd import projection as projection_module
from draftstore.stores.dresd.projection import Projection, fit, moments


def states_of(count: int, size: int, seed: int = 0) -> NDArray[np.float32]:
    """Return states of which some numbers are large, some small, and none independent."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, size)) * np.linspace(1, 3, size) @ rng.standard_normal((size, size))
    states: NDArray[np.float32] = (
        mixed * 10.0 ** rng.uniform(-3, 3, size) + rng.uniform(-50, 50, size)
    ).astype(np.float32)
    return states


@given(count=st.integers(30, 300), size=st.integers(2, 24), seed=st.integers(0, 99))
def test_the_projection_is_that_of_scikit_learn(count: int, size: int, seed: int) -> None:
    states = states_of(count, size, seed)
    dims = max(size // 2, 1)
    projection, explained = fit(states, dims)
    scaled = StandardScaler().fit_transform(states.astype(np.float64))
    pca = PCA(dims, svd_solver="full").fit(scaled)
    expected = pca.transform(scaled)
    found = projection.apply(states)
    signs = np.sign((found * expected).sum(axis=0))
    assert np.abs(found - expected * signs).max() < 0.02 * np.abs(expected).max()
    assert explained == pytest.approx(float(pca.explained_variance_ratio_.sum()), abs=1e-4)


def test_moments_are_exact_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(500, 10)
    exact = states.astype(np.float64)
    scale = exact.std(axis=0)
    for part in (4096, 64):
        monkeypatch.setattr(projection_module, "PART", part)
        count, mean, covariance = moments(states)
        assert count == 500
        assert np.allclose((mean - exact.mean(axis=0)) / scale, 0, atol=1e-6)
        expected = np.cov(exact.T, bias=True)
        assert np.allclose((covariance - expected) / np.outer(scale, scale), 0, atol=1e-5)


def test_nonfinite_states_are_skipped() -> None:
    states = states_of(100, 6)
    broken = np.insert(states, [0, 5, 50, 100], np.nan, axis=0)
    broken[6] = np.inf
    assert moments(broken)[0] == 100
    assert fit(broken, 3)[0].to_bytes() == fit(states, 3)[0].to_bytes()


def test_constant_dimensions_get_no_weight() -> None:
    states = states_of(100, 6)
    states[:, 1], states[:, 4] = 0.1, 0.0
    projection, explained = fit(states, 4)
    assert (projection.weights[:, [1, 4]] == 0).all()
    assert np.isfinite(projection.weights).all()
    assert explained == pytest.approx(1, abs=1e-6)
    equal, nothing = fit(np.ones((9, 3), np.float32), 2)
    assert (equal.weights == 0).all()
    assert nothing == 0


def test_nonfinite_projections_are_refused() -> None:
    with pytest.raises(DraftstoreError, match="not finite: build its store again"):
        Projection(np.ones((2, 3), np.float32), np.array([1, np.nan], np.float32))
