import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftstore.drafting.projection import unit
from draftstore.errors import DraftstoreError
from draftstore.stores.dresd import quality as dresd_quality
from draftstore.stores.dresd.kernels.nearest import ALL, DenseIndex, Neighbours, search
from draftstore.stores.dresd.kernels.quantised import quantise, restore
from draftstore.stores.dresd.quality import mean_reciprocal_rank, recall, reciprocal_ranks
from draftstore.stores.dresd.store import DresdStore
from tests.fakes.dense_stores import make_dense_store, make_projection, make_states
from tests.unit.stores.dresd.test_store import salad

LITTLE = 1e-6
"""A probing that visits as few lists as it can."""


def index_of(
    vectors: NDArray[np.float32], dtype: str = "float16", groups: list[int] | None = None
) -> DenseIndex:
    """Return an index of vectors, all of one group unless told; without lists."""
    codes = quantise(vectors, dtype)
    bounds = np.array(groups or [0, len(vectors)], np.int64)
    return DenseIndex(
        codes.view(np.uint16) if dtype == "float16" else codes,
        np.zeros(len(vectors), np.uint32),
        bounds,
        np.zeros(len(bounds), np.int32),
        np.array([len(vectors)], np.int64),
        np.empty((0, vectors.shape[1]), np.float32),
    )


def random_units(count: int, dims: int = 8, seed: int = 0) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even a few entries and queries take several blocks."""
    monkeypatch.setattr(dresd_quality, "_ROWS", 7)
    monkeypatch.setattr(dresd_quality, "_QUERIES", 3)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_ranks_are_those_of_brute_force(dtype: str, small_blocks: None) -> None:
    stored = random_units(40)
    index = index_of(stored, dtype, [0, 11, 40])
    entries = np.array([5, 0, 39, 5, 17, 12, 11, 3], np.int64)
    queries = np.float32(2.5) * (stored[entries] + np.float32(1.5) * random_units(len(entries), seed=1))
    vectors = restore(index.vectors).astype(np.float64)
    expected = []
    for entry, query in zip(entries.tolist(), queries, strict=True):
        cosines = vectors @ query
        expected.append(1.0 / (1 + sum(cosine > cosines[entry] + 1e-5 for cosine in cosines)))
    assert len(set(expected)) > 2
    assert reciprocal_ranks(index, queries, entries).tolist() == expected
    assert mean_reciprocal_rank(index, queries, entries) == pytest.approx(sum(expected) / len(expected))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_entries_that_are_asked_for_with_their_own_states_come_first(dtype: str) -> None:
    stored = random_units(500, 64)
    assert mean_reciprocal_rank(index_of(stored, dtype), stored, np.arange(500)) == 1.0


def test_equal_vectors_all_rank_best(small_blocks: None) -> None:
    stored = np.repeat(random_units(3), 10, axis=0)
    assert reciprocal_ranks(index_of(stored), stored, np.arange(30)).tolist() == [1.0] * 30
    nearer = np.concatenate([stored, stored[:1] + np.float32(0.01)])
    ranks = 1.0 / reciprocal_ranks(index_of(unit(nearer)), np.repeat(nearer[-1:], 30, axis=0), np.arange(30))
    assert ranks[:10].tolist() == [2.0] * 10
    assert set(ranks[10:]) == {12.0, 22.0}


def test_equal_vectors_in_any_order(small_blocks: None) -> None:
    stored = np.concatenate([random_units(1), np.repeat(random_units(1, seed=1), 3, axis=0)])
    index = index_of(stored)
    shares = reciprocal_ranks(index, stored, np.arange(4), "any")
    assert shares == pytest.approx([1.0, *[(1 + 1 / 2 + 1 / 3) / 3] * 3])
    behind = reciprocal_ranks(index, stored[[0, 0]], np.array([1, 3]), "any")
    assert behind == pytest.approx([(1 / 2 + 1 / 3 + 1 / 4) / 3] * 2)
    assert mean_reciprocal_rank(index, stored, np.arange(4), "any") == pytest.approx(shares.mean())
    assert reciprocal_ranks(index, np.full((1, 8), np.nan, np.float32), np.array([1]), "any").tolist() == [
        0.0
    ]


def test_queries_that_ask_for_nothing(small_blocks: None) -> None:
    stored = random_units(9)
    queries = stored[:4].copy()
    queries[1], queries[2] = np.nan, 0.0
    assert reciprocal_ranks(index_of(stored), queries, np.arange(4)).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert math.isnan(mean_reciprocal_rank(index_of(stored), queries[:0], np.arange(0)))
    assert math.isnan(recall(index_of(stored), queries[:0], np.empty(0, np.int32)))
    assert math.isnan(recall(index_of(stored), queries[1:3], np.zeros(2, np.int32)))
    assert math.isnan(recall(index_of(stored), queries, np.ones(4, np.int32))), "no such group"


@pytest.mark.parametrize(
    ("queries", "entries"), [((3, 8), [0, 1]), ((2, 7), [0, 1]), ((2, 8), [0, 9]), ((2, 8), [-1, 0])]
)
def test_what_does_not_fit_is_refused(queries: tuple[int, int], entries: list[int]) -> None:
    with pytest.raises(DraftstoreError, match=r"expected \(2, 8\)|the store has 9"):
        reciprocal_ranks(index_of(random_units(9)), np.ones(queries, np.float32), np.array(entries))


def test_recall_of_a_store(tmp_path: Path, small_blocks: None) -> None:
    documents = salad(30)
    states, projection = make_states(documents), make_projection()
    store = DresdStore.open(make_dense_store(tmp_path / "store", documents, states, projection=projection))
    tokens = np.array([3, 3, 4, 5, 6, 49, 3, 7] * 8, np.int32)
    queries = random_units(len(tokens))
    assert recall(store.index, queries, tokens, probing=ALL) == 1.0
    found = recall(store.index, queries, tokens, 5, LITTLE)
    assert 0.0 < found < 1.0
    shares = []
    for query, token in zip(queries, tokens.tolist(), strict=True):
        first, last = store.index.groups[token : token + 2].tolist()
        if first == last:
            continue
        cosines = restore(store.index.vectors)[first:last] @ query
        best = (first + np.argsort(-cosines)[:5]).tolist()
        near = search(store.index, query[None], np.array([token], np.int32), 5, LITTLE).entries[0].tolist()
        shares.append(len({*best} & {*near}) / len(best))
    assert found == pytest.approx(sum(shares) / len(shares))


def test_equally_near_entries_count_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of many equal entries is found does not matter."""
    index = index_of(np.repeat(random_units(1), 20, axis=0))

    def last_ones(index: DenseIndex, queries: Any, tokens: Any, k: int, probing: float) -> Neighbours:
        found = search(index, queries, tokens, 2 * k, probing)
        return found._replace(entries=found.entries[:, -10:], similarities=found.similarities[:, -10:])

    monkeypatch.setattr(dresd_quality, "search", last_ones)
    assert recall(index, random_units(4, seed=2), np.zeros(4, np.int32)) == 1.0
