from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.jit import read_only
from draftstore.stores.dresd.grouping import to_half
from draftstore.stores.dresd.kernels.nearest import ALL, LARGE, DenseIndex, project, search
from draftstore.stores.dresd.projection import unit
from tests import reference
from tests.fakes.dense_stores import make_projection


def make_index(
    vectors: NDArray[np.float32],
    sizes: Sequence[int],
    lists: Sequence[Sequence[int]] = (),
    centroids: NDArray[np.float32] | None = None,
    positions: type = np.uint32,
) -> DenseIndex:
    """Assemble an index of unit vectors in the order of entries; `lists` are the sizes of the lists of each group."""
    groups = np.append(0, np.cumsum(sizes))
    counts = [len(cut) for cut in lists] or [0] * len(sizes)
    starts = [
        start + place
        for start, cut in zip(groups.tolist(), lists, strict=False)
        for place in (np.cumsum(cut) - np.array(cut, int)).tolist()
    ]
    return DenseIndex(
        read_only(to_half(vectors).view(np.uint16)),
        read_only(np.arange(len(vectors), dtype=positions)),
        read_only(groups.astype(np.int64)),
        read_only(np.append(0, np.cumsum(counts)).astype(np.int32)),
        read_only(np.array([*starts, len(vectors)], np.int64)),
        read_only(np.empty((0, vectors.shape[1]), np.float32) if centroids is None else centroids),
    )


def exact_vectors(count: int, dims: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return unit vectors of four halves each: products with their like are exact, and many are equal."""
    vectors = np.zeros((count, dims), np.float32)
    for vector in vectors:
        vector[rng.permutation(dims)[:4]] = rng.choice([-0.5, 0.5], 4)
    return vectors


def directions(count: int, dims: int, seed: int) -> NDArray[np.float32]:
    return unit(np.random.default_rng(seed).standard_normal((count, dims)).astype(np.float32))


def neighbours(entries: NDArray[np.int64], similarities: NDArray[np.float32]) -> list[tuple[int, float]]:
    """Return the neighbours of one query, after checking the padding behind them."""
    count = int((entries >= 0).sum())
    assert (entries[count:] == -1).all()
    assert (similarities[count:] == -np.inf).all()
    return list(zip(entries[:count].tolist(), similarities[:count].tolist(), strict=True))


# -- everything visited --------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=6),
    dims=st.sampled_from([4, 5, 16, 64, 67]),
    k=st.integers(1, 40),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_nearest_entries_of_the_group_are_found(
    sizes: list[int], dims: int, k: int, wide: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = exact_vectors(sum(sizes), dims, rng)
    index = make_index(vectors, sizes, positions=np.uint64 if wide else np.uint32)
    tokens = rng.integers(-2, len(sizes) + 2, 12).astype(np.int32)
    queries = exact_vectors(12, dims, rng) * rng.choice([0.25, 1.0, 64.0], (12, 1)).astype(np.float32)
    found, similarities, group_sizes = search(index, queries, tokens, k, ALL)
    groups = index.groups.tolist()
    for row, token in enumerate(tokens.tolist()):
        group = range(*groups[token : token + 2]) if 0 <= token < len(sizes) else range(0)
        expected = reference.nearest_entries(vectors.astype(float), group, queries[row].astype(float), k)
        assert neighbours(found[row], similarities[row]) == expected
        assert group_sizes[row] == len(group)


def test_every_float16_is_read_right() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.isfinite(bits.view(np.float16))]
    index = make_index(np.zeros((len(bits), 1), np.float32), [1] * len(bits))
    index = index._replace(vectors=read_only(bits[:, None]))
    tokens = np.arange(len(bits), dtype=np.int32)
    _, similarities, _ = search(index, np.ones((len(bits), 1), np.float32), tokens, 1, ALL)
    assert (similarities[:, 0] == bits.view(np.float16)).all()


# -- lists ---------------------------------------------------------------------------------------------------


@given(
    lists=st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=4),
    k=st.integers(1, 30),
    probing=st.sampled_from([1e-6, 0.001, 0.003, 0.01, 0.1, ALL]),
    seed=st.integers(0, 999),
)
def test_the_lists_with_the_nearest_centroids_are_visited(
    lists: list[list[int]], k: int, probing: float, seed: int
) -> None:
    """Groups without lists are small ones, of twenty entries; what is found is the best of the lists visited."""
    rng = np.random.default_rng(seed)
    sizes = [sum(cut) if cut else 20 for cut in lists]
    vectors = exact_vectors(sum(sizes), 16, rng)
    centroids = directions(sum(map(len, lists)), 16, seed)
    index = make_index(vectors, sizes, lists, centroids)
    queries = exact_vectors(8, 16, rng)
    tokens = rng.integers(0, len(lists), 8).astype(np.int32)
    found, similarities, group_sizes = search(index, queries, tokens, k, probing)
    for row, token in enumerate(tokens.tolist()):
        start, first, cut = int(index.groups[token]), int(index.group_lists[token]), lists[token]
        query = queries[row].astype(float)
        entries = set(range(start, start + sizes[token]))
        if cut and probing < ALL:
            wanted = probing * (sizes[token] * LARGE) ** 0.5
            visited = reference.visited_lists(
                centroids[first : first + len(cut)].astype(float), cut, query, wanted, k
            )
            ends = (start + np.cumsum(cut)).tolist()
            entries = {e for number in visited for e in range(ends[number] - cut[number], ends[number])}
        assert neighbours(found[row], similarities[row]) == reference.nearest_entries(
            vectors.astype(float), entries, query, k
        )
        assert group_sizes[row] == sizes[token]


@given(size=st.integers(1, 70), dims=st.integers(1, 9), batch=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_state_gives_the_same_query_in_every_batch(size: int, dims: int, batch: int, seed: int) -> None:
    projection = make_projection(size, dims, seed)
    states = np.random.default_rng(seed).standard_normal((batch, size)).astype(np.float16)
    found = project(projection.weights, projection.bias, states.astype(np.float32))
    np.testing.assert_allclose(found, projection.apply(states), rtol=1e-4, atol=1e-4)
    for state, query in zip(states.astype(np.float32), found, strict=True):
        [alone] = project(projection.weights, projection.bias, state[None])
        np.testing.assert_array_equal(alone, query, strict=True)
