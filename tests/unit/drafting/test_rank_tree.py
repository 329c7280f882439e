from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.rank_tree import MAX_PATHS, PRIOR, PRIOR_TRIES, SHARED_TRIES, RankTree, parse_paths
from draftstore.errors import DraftstoreError
from tests.examples import examples


def test_the_paper_s_tree_has_80_nodes_in_6_layers() -> None:
    tree = RankTree()
    layers = Counter(map(len, tree.paths))
    assert dict(layers) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    assert len(tree) == 80
    # Children always are the first ranks, so their number says it all.
    children = Counter(path[:-1] for path in tree.paths)
    assert all(f"{parent}{rank}" in tree.paths for parent, size in children.items() for rank in range(size))
    assert dict(children) == {
        "": 8,
        "0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1,
        "00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1,
        "10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1,
        "000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1, "100": 1, "200": 1, "300": 1,
        "0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1,
        "00000": 2, "00010": 1,
    }  # fmt: skip


def test_a_notation_of_paths() -> None:
    assert parse_paths(" 0-2\n00-01 07 ") == ["0", "1", "2", "00", "01", "07"]


def test_children_stand_side_by_side() -> None:
    tree = RankTree()
    for slot, parent in enumerate(("", *tree.paths)):
        begin, end = tree.starts[slot : slot + 2].tolist()
        assert list(tree.paths[begin:end]) == [path for path in tree.paths if path[:-1] == parent]
        assert np.all(tree.parents[begin:end] == slot - 1)
    assert [int(path[-1]) for path in tree.paths] == tree.ranks.tolist()


def random_tree(seed: int, most: int = 400) -> RankTree:
    rng = np.random.default_rng(seed)
    tree = RankTree()
    tree.tries[:] = rng.integers(0, most, 80)
    tree.hits[:] = rng.integers(0, 1 + tree.tries)
    return tree


@given(st.integers(0, 500))
def test_no_path_is_likelier_than_its_parent(seed: int) -> None:
    tree = random_tree(seed)
    probs = np.append(tree.probs(), 1.0)
    assert np.all(probs[:-1] <= probs[tree.parents])
    assert np.all((probs > 0) & (probs <= 1))


def test_rates_go_from_the_prior_to_what_was_counted() -> None:
    tree = RankTree()
    assert np.allclose(tree.probs()[:8], PRIOR)
    assert np.isclose(tree.probs()[tree.paths.index("010")], PRIOR[0] ** 2 * PRIOR[1])
    assert np.all(np.diff(PRIOR) < 0)
    assert PRIOR.sum() < 1
    place = tree.paths.index("1")
    tree.tries[place], tree.hits[place] = 100, 60
    shared = (60 + PRIOR_TRIES * PRIOR[1]) / (100 + PRIOR_TRIES)
    assert np.isclose(tree.probs()[place], (60 + SHARED_TRIES * shared) / (100 + SHARED_TRIES))
    other = tree.paths.index("01")
    assert np.isclose(tree.probs()[other], PRIOR[0] * shared), "a path that was never tried leans on its rank"
    tree.tries[place], tree.hits[place] = 10**9, 7 * 10**8
    assert np.isclose(tree.probs()[place], 0.7)


@examples(30)
@given(st.integers(0, 500), st.integers(1, 79), st.integers(81, 300))
def test_other_sizes_keep_the_likeliest(seed: int, fewer: int, more: int) -> None:
    tree = random_tree(seed)
    chances = dict(zip(tree.paths, tree.probs().tolist(), strict=True))
    small, large = tree.resized(fewer), tree.resized(more)
    assert (len(small), len(large)) == (fewer, more)
    assert set(small.paths) < set(tree.paths) < set(large.paths)
    assert min(chances[path] for path in small.paths) >= max(
        chances[path] for path in set(chances) - {*small.paths}
    )
    for other in (small, large):
        counts = dict(zip(other.paths, zip(other.tries, other.hits, strict=True), strict=True))
        for place, path in enumerate(tree.paths):
            assert path not in counts or counts[path] == (tree.tries[place], tree.hits[place])
    assert tree.resized(80).paths == tree.paths
    assert large.resized(more).paths == large.paths


def test_a_tree_grows_by_the_likeliest_path_beyond_it() -> None:
    tree = RankTree(["0", "1"], [900, 900], [810, 45])
    rate_0, rate_1 = 0.9, 0.05
    # 00 is 0.81, 000 0.73 and so on; 1 is there; 10 is 0.045 as 01 is, but for smoothing.
    assert tree.resized(5).paths == ("0", "1", "00", "000", "0000")
    assert rate_0**3 > rate_1
    assert len(tree.resized(MAX_PATHS)) == MAX_PATHS
    for nodes in (0, MAX_PATHS + 1):
        with pytest.raises(DraftstoreError, match=f"a static tree of {nodes} nodes"):
            tree.resized(nodes)


@pytest.mark.parametrize(
    ("paths", "tries", "hits", "message"),
    [
        ([], [], [], "0 rank paths"),
        (["0", "0"], [0, 0], [0, 0], "each once"),
        (["0", "11"], [0, 0], [0, 0], "'11' stands without its parent '1'"),
        (["8"], [0], [0], "digits from 0 to 7"),
        ([""], [0], [0], "expected 1 to 63 digits"),
        (["0"], [1], [2], "2 hits of 1 tries"),
        (["0"], [-1], [-1], "-1 tries"),
        (["0"], [2**62], [0], "tries"),
        (["0"], [1, 2], [0], "1 rank paths with 2 tries"),
        (["0" * size for size in range(1, 65)], None, None, "expected 1 to 63 digits"),
    ],
)
def test_invalid_rank_trees_are_refused(
    paths: list[str], tries: list[int] | None, hits: list[int] | None, message: str
) -> None:
    with pytest.raises(DraftstoreError, match=message):
        RankTree(paths, tries, hits)
