from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftstore.recycling.paths import (
    PARENTS,
    PATHS,
    PRIOR,
    PRIOR_TRIES,
    RANKS,
    SHARED_TRIES,
    STARTS,
    WIDTH,
    new_counts,
    path_probs,
)


def test_the_paper_s_tree_has_80_nodes_in_6_layers() -> None:
    assert Counter(map(len, PATHS)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert len({*PATHS}) == 80
    children = Counter(path[:-1] for path in PATHS)
    assert all(f"{parent}{rank}" in PATHS for parent, size in children.items() for rank in range(size))


def test_children_stand_side_by_side() -> None:
    for slot, parent in enumerate(("", *PATHS)):
        begin, end = STARTS[slot : slot + 2].tolist()
        assert list(PATHS[begin:end]) == [path for path in PATHS if path[:-1] == parent]
        assert np.all(PARENTS[begin:end] == slot - 1)
    assert [int(path[-1]) for path in PATHS] == RANKS.tolist()


@given(st.integers(0, 500))
def test_no_path_is_likelier_than_its_parent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = new_counts()
    counts[0] = rng.integers(0, 400, len(PATHS) + WIDTH)
    counts[1] = rng.integers(0, 1 + counts[0])
    probs = path_probs(counts)[: len(PATHS)]
    assert np.all(probs <= np.append(probs, 1.0)[PARENTS])
    assert np.all((probs > 0) & (probs <= 1))


def test_rates_go_from_the_prior_to_what_was_counted() -> None:
    counts = new_counts()
    assert np.allclose(path_probs(counts)[:8], PRIOR)
    assert np.isclose(path_probs(counts)[PATHS.index("010")], PRIOR[0] ** 2 * PRIOR[1])
    place = PATHS.index("1")
    counts[:, place] = 100, 60
    shared = (60 + PRIOR_TRIES * PRIOR[1]) / (100 + PRIOR_TRIES)
    assert np.isclose(path_probs(counts)[place], (60 + SHARED_TRIES * shared) / (100 + SHARED_TRIES))
    other = path_probs(counts)[PATHS.index("01")]
    assert np.isclose(other, PRIOR[0] * shared), "a path that was never tried leans on its rank"
    counts[:, place] = 10**9, 7 * 10**8
    assert np.isclose(path_probs(counts)[place], 0.7)
