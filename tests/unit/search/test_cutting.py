import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.search.cutting import BLOCK, Trees, cut_trees, draw_trees
from draftstore.search.expand import Rule
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.rest.store import RestStore
from draftstore.trees.tree import level_of
from tests import reference
from tests.examples import examples
from tests.reference import Documents, Ngram, UnclearError, make_index, nodes_of
from tests.unit.search.test_expand import NARROW, WIDE, corpora, documents_of


def matrix(ngrams: Sequence[Ngram]) -> NDArray[np.int32]:
    return np.array(ngrams, np.int32)


def assert_exact(index: SuffixIndex, documents: Documents, n: int, nodes: int, depth: int) -> None:
    """Compare the trees of all n-grams with their tries."""
    counts = sorted(reference.ngram_counts(documents, n).items())
    if not counts:
        return
    trees = cut_trees(index, matrix([ngram for ngram, _ in counts]), nodes, depth)
    for place, (ngram, count) in enumerate(counts):
        tree = trees.tree(place)
        tree.validate()
        expected = reference.ngram_tree(documents, ngram, nodes, depth)
        assert nodes_of(tree) == expected
        assert (trees.counts[place], trees.sizes[place]) == (count, len(expected))
        # The trees of n-grams that nothing follows are of no use, and nobody asks for their followers.
        assert trees.distinct[place] == (reference.followers(documents, ngram) if expected else 0)


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@examples(150)
@given(st.data(), st.integers(1, 5), st.integers(1, 6) | st.just(64), st.integers(1, 10))
def test_trees_are_the_heaviest_nodes_of_the_trie(
    vocab_size: int, data: st.DataObject, n: int, nodes: int, depth: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    try:
        assert_exact(make_index(corpus, vocab_size), documents_of(corpus), n, nodes, depth)
    except UnclearError:
        reject()


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(st.data(), st.integers(1, 4), st.integers(1, 6) | st.just(64), st.integers(1, 6))
def test_drawn_trees_are_drafts_of_the_rule(
    vocab_size: int, data: st.DataObject, n: int, nodes: int, depth: int
) -> None:
    """The tree of an n-gram is that of a context that holds nothing else; what nothing follows has none."""
    corpus = data.draw(corpora(vocab_size))
    documents = documents_of(corpus)
    counts = sorted(reference.ngram_counts(documents, n).items())
    rule = Rule(16, 1, depth, rows=1 << 16, floor=0.01, alpha=0.731, beta=0.377, gamma=0.75)
    if not counts:
        return
    trees = draw_trees(make_index(corpus, vocab_size), rule, matrix([ngram for ngram, _ in counts]), nodes)
    for place, (ngram, count) in enumerate(counts):
        followed = any(reference.continuations(documents, ngram))
        try:
            expected = reference.backoff_tree(documents, rule, ngram, nodes, 255) if followed else []
        except UnclearError:
            reject()
        assert nodes_of(trees.tree(place)) == expected
        assert trees.counts[place] == count
        assert trees.distinct[place] == (reference.followers(documents, ngram) if followed else 0)


def test_trees_of_rich_text_over_many_segments() -> None:
    """Enough text that 64 nodes do not hold all, and that levels, ties and cuts all matter."""
    rng = np.random.default_rng(4)
    documents = [((rng.zipf(1.6, 120) - 1) % 9).tolist() for _ in range(12)]
    for corpus in ([documents], [documents[:1], documents[1:7], documents[7:]], [[d] for d in documents]):
        index = make_index(corpus, 9)
        for n in (1, 3):
            for ngram in reference.most_common(documents, n, 6):
                tree = cut_trees(index, matrix([ngram]), 64, 10).tree(0)
                assert nodes_of(tree) == reference.ngram_tree(documents, ngram, 64, 10)
                assert len(tree) == 64


@pytest.mark.parametrize("cuts", [[], [1, 2_000], [500, 501, 3_999]])
def test_every_occurrence_is_read_however_many(cuts: list[int]) -> None:
    """REST reads 1,024 evenly spaced rows; here a token that follows once in 4,000 has a node of its own."""
    followers = [1] * 2_500 + [2] * 1_490 + list(range(3, 13))
    np.random.default_rng(6).shuffle(followers)
    documents = [[0, follower, 0] for follower in followers]
    bounds = [0, *cuts, len(documents)]
    corpus = [documents[a:b] for a, b in pairwise(bounds)]
    trees = cut_trees(make_index(corpus, 20), matrix([(0,)]), 64, 1)
    counts = Counter(followers)
    expected = sorted((level_of(count / 8_000), token) for token, count in counts.items())
    tree = trees.tree(0)
    assert list(zip(tree.levels.tolist(), tree.tokens.tolist(), strict=True)) == expected
    assert (trees.counts[0], trees.distinct[0]) == (8_000, 13)


def test_documents_end_and_never_join() -> None:
    index = make_index([[[1, 2], [3, 4], [1, 2, 3]], [[1, 2]]], NARROW)
    trees = cut_trees(index, matrix([(1, 2), (2, 3), (3, 4)]), 64, 10)
    assert nodes_of(trees.tree(0)) == [(3, -1, level_of(1 / 3))]
    assert (trees.counts.tolist(), trees.sizes.tolist()) == ([3, 1, 1], [1, 0, 0])
    assert trees.distinct[0] == 2


def test_absent_ngrams_have_no_tree() -> None:
    index = make_index([[[1, 2, 3]]], NARROW)
    trees = cut_trees(index, matrix([(2, 1), (4, 4), (1, 2)]), 8, 10)
    assert (trees.counts.tolist(), trees.sizes.tolist()) == ([0, 0, 1], [0, 0, 1])
    none = cut_trees(index, np.empty((0, 2), np.int32), 8, 10)
    assert [len(array) for array in none] == [0] * 6


def equal(left: Trees, right: Trees, places: slice | NDArray[Any] = slice(None)) -> bool:
    """Compare trees, the room behind each left out."""
    return all(
        left.tree(place) == right.tree(other)
        and left.counts[place] == right.counts[other]
        and left.distinct[place] == right.distinct[other]
        for place, other in enumerate(np.arange(len(right.sizes))[places].tolist())
    )


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_blocks_and_workers_do_not_show(size: int) -> None:
    rng = np.random.default_rng(8)
    documents = [((rng.zipf(1.3, 400) - 1) % 60).tolist() for _ in range(10)]
    index = make_index([documents[:3], documents[3:]], 60)
    ngrams = matrix(reference.most_common(documents, 2, size))
    assert len(ngrams) == size
    trees = cut_trees(index, ngrams, 16, 10, workers=1)
    assert equal(cut_trees(index, ngrams, 16, 10, workers=7), trees)
    order = rng.permutation(size)
    assert equal(cut_trees(index, ngrams[order], 16, 10), trees, order)


DAMAGED = """
import numpy as np
from draftstore.search.cutting import cut_trees
from draftstore.jit import read_only
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from tests.reference import make_index

chance = np.random.default_rng(0)
index = make_index([[chance.integers(0, 5, 2_000).tolist() for _ in range(40)]], 5)
suffixes = np.array(index.suffixes)
for first, stop in zip(index.first_rows[0, :-1], index.first_rows[0, 1:]):
    suffixes[first:stop] = chance.permutation(suffixes[first:stop])
damaged = index._replace(suffixes=read_only(suffixes))
for _ in range(20):
    cut_trees(damaged, np.array([[0], [1]], np.int32), 64, 10, workers=1)
    for rule in STRATEGIES.values():
        RestDrafter(damaged, rule).draft(np.array([[0, 1], [2, 3]], np.int32))
"""


def test_rows_out_of_order_do_not_crash() -> None:
    """What follows the rows of a damaged store comes in as many runs as there are rows."""
    done = subprocess.run([sys.executable, "-c", DAMAGED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_real_text(real_store: Path) -> None:
    """The most common n-grams of real chats: thousands of occurrences over several segments."""
    index = RestStore.open(real_store).index
    tokens = np.asarray(index.tokens, np.int64)
    for n in (1, 2, 4):
        ends = np.arange(n, len(tokens))
        runs = np.stack([tokens[ends - n + j] for j in range(n)], axis=1)
        clean = np.flatnonzero((runs < index.vocab_size).all(axis=1))
        ngrams, counts = np.unique(runs[clean], axis=0, return_counts=True)
        chosen = ngrams[np.argsort(-counts, kind="stable")[[0, 7, 99]]]
        trees = cut_trees(index, np.ascontiguousarray(chosen, np.int32), 64, 10)
        for place, ngram in enumerate(chosen):
            starts = ends[clean][(runs[clean] == ngram).all(axis=1)]
            nodes, distinct = trie(tokens, starts, index.vocab_size, 64, 10)
            assert nodes_of(trees.tree(place)) == nodes
            assert (trees.counts[place], trees.distinct[place]) == (len(starts), distinct)


def trie(
    tokens: NDArray[np.int64], starts: NDArray[np.int64], vocab_size: int, nodes: int, depth: int
) -> tuple[reference.Nodes, int]:
    """Count the paths from some positions on; return the heaviest, and the distinct tokens at the positions."""
    visits: Counter[Ngram] = Counter()
    for start in starts.tolist():
        path: Ngram = ()
        for token in tokens[start : start + depth].tolist():
            if token >= vocab_size:
                break
            path = (*path, token)
            visits[path] += 1
    floor = sorted(visits.values())[-min(len(visits), 4 * nodes)]
    chances = {path: count / len(starts) for path, count in visits.items() if count >= floor}
    return reference.heaviest(chances, nodes, depth, 255), len(np.unique(tokens[starts]))
