from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.stores.dresd import quality as dresd_quality
from draftstore.stores.dresd.kernels.nearest import ALL, DenseIndex, search
from draftstore.stores.dresd.kernels.quantised import quantise, restore
from draftstore.stores.dresd.projection import unit
from draftstore.stores.dresd.quality import figures
from draftstore.stores.dresd.store import DresdStore
from tests.fakes.dense_stores import make_dense_store, make_projection, make_states
from tests.unit.stores.dresd.test_store import salad

LITTLE = 1e-6
"""A probing that visits as few lists as it can."""


def random_units(count: int, dims: int = 8, seed: int = 0) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


def measured(
    stored: NDArray[np.float32],
    queries: NDArray[np.float32],
    entries: NDArray[np.int64],
    dtype: str = "float16",
) -> dict[str, int | float]:
    """Return the figures of a store without lists, whose entries follow token 0 and lie at 1, 2, ..."""
    codes = quantise(stored, dtype)
    index = DenseIndex(
        codes.view(np.uint16) if dtype == "float16" else codes,
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
    monkeypatch.setattr(dresd_quality, "_ROWS", 7)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_ranks_are_those_of_brute_force(dtype: str, small_blocks: None) -> None:
    stored = random_units(40)
    entries = np.array([5, 0, 39, 5, 17, 12, 11, 3], np.int64)
    queries = np.float32(2.5) * (stored[entries] + np.float32(1.5) * random_units(len(entries), seed=1))
    vectors = restore(quantise(stored, dtype)).astype(np.float64)
    expected = []
    for entry, query in zip(entries.tolist(), queries, strict=True):
        cosines = vectors @ query
        expected.append(1.0 / (1 + sum(cosine > cosines[entry] + 1e-5 for cosine in cosines)))
    assert len(set(expected)) > 2
    found = measured(stored, queries, entries, dtype)
    assert found["mean_reciprocal_rank"] == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def test_equal_vectors(small_blocks: None) -> None:
    stored = np.concatenate([random_units(1), np.repeat(random_units(1, seed=1), 3, axis=0)])
    found = measured(stored, stored, np.arange(4))
    assert found["mean_reciprocal_rank"] == 1.0
    assert found["mean_reciprocal_rank_ties"] == pytest.approx(
        (1 + 3 * (1 + 1 / 2 + 1 / 3) / 3) / 4, abs=1e-6
    )
    behind = measured(stored, stored[[0, 0]], np.array([1, 3]))
    assert behind["mean_reciprocal_rank"] == 0.5
    assert behind["mean_reciprocal_rank_ties"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, abs=1e-6)


def test_recall_of_a_store(tmp_path: Path) -> None:
    documents = salad(30)
    states, projection = make_states(documents), make_projection()
    store = DresdStore.open(make_dense_store(tmp_path / "store", documents, states, projection=projection))
    places = store.index.positions[:: len(store.index.positions) // 60].astype(np.int64)
    queries, tokens = random_units(len(places)), store.tokens[places - 1].astype(np.int32)
    assert figures(store.index, store.tokens, places, queries, ALL)["recall_at_10"] == 1.0
    shares = []
    for query, token in zip(queries, tokens, strict=True):
        first, last = store.index.groups[token : token + 2].tolist()
        best = first + np.argsort(-(restore(store.index.vectors)[first:last] @ query))[:10]
        near = search(store.index, query[None], np.array([token]), 10, LITTLE).entries[0].tolist()
        shares.append(len({*best.tolist()} & {*near}) / len(best))
    found = figures(store.index, store.tokens, places, queries, LITTLE)["recall_at_10"]
    assert 0.0 < found < 1.0
    assert found == pytest.approx(sum(shares) / len(shares), abs=1e-6)
