import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.stores.dresd import build as dresd_build
from draftstore.stores.dresd.build import figures
from draftstore.stores.dresd.grouping import to_half
from draftstore.stores.dresd.kernels.nearest import DenseIndex
from draftstore.stores.dresd.projection import unit


def random_units(count: int, dims: int = 8, seed: int = 0) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


def measured(
    stored: NDArray[np.float32],
    queries: NDArray[np.float32],
    entries: NDArray[np.int64],
) -> dict[str, int | float]:
    """Return the figures of a store without lists, whose entries follow token 0 and lie at 1, 2, ..."""
    index = DenseIndex(
        to_half(stored).view(np.uint16),
        np.arange(1, len(stored) + 1, dtype=np.uint32),
        np.array([0, len(stored)], np.int64),
        np.zeros(2, np.int32),
        np.array([len(stored)], np.int64),
        np.empty((0, stored.shape[1]), np.float32),
    )
    return figures(index, np.zeros(len(stored) + 1, np.uint16), entries + 1, queries)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even a few entries take several blocks."""
    monkeypatch.setattr(dresd_build, "RANKED_ROWS", 7)


def test_ranks_are_those_of_brute_force(small_blocks: None) -> None:
    stored = random_units(40)
    entries = np.array([5, 0, 39, 5, 17, 12, 11, 3], np.int64)
    queries = np.float32(2.5) * (stored[entries] + np.float32(1.5) * random_units(len(entries), seed=1))
    vectors = to_half(stored).astype(np.float64)
    expected = []
    for entry, query in zip(entries.tolist(), queries, strict=True):
        cosines = vectors @ query
        expected.append(1.0 / (1 + sum(cosine > cosines[entry] + 1e-5 for cosine in cosines)))
    assert len(set(expected)) > 2
    found = measured(stored, queries, entries)
    assert found["mean_reciprocal_rank"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)
