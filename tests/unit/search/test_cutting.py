import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.search.cutting import BLOCK, Trees, cut_trees, draw_trees
from draftstore.search.expand import Rule
from draftstore.trees.tree import DraftTree, level_of
from tests import reference
from tests.reference import Ngram, UnclearError, make_index, nodes_of
from tests.unit.search.test_expand import NARROW, WIDE, corpora, documents_of


def matrix(ngrams: Sequence[Ngram]) -> NDArray[np.int32]:
    return np.array(ngrams, np.int32)


def tree_at(trees: Trees, place: int) -> DraftTree:
    size = trees.sizes[place]
    return DraftTree(trees.tokens[place, :size], trees.parents[place, :size], trees.levels[place, :size])


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(st.data(), st.integers(1, 5), st.integers(1, 6) | st.just(64), st.integers(1, 10))
def test_trees_are_the_heaviest_nodes_of_the_trie(
    vocab_size: int, data: st.DataObject, n: int, nodes: int, depth: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    documents = documents_of(corpus)
    counts = sorted(reference.ngram_counts(documents, n).items())
    if not counts:
        return
    trees = cut_trees(make_index(corpus, vocab_size), matrix([ngram for ngram, _ in counts]), nodes, depth)
    for place, (ngram, count) in enumerate(counts):
        tree = tree_at(trees, place)
        tree.validate()
        try:
            expected = reference.ngram_tree(documents, ngram, nodes, depth)
        except UnclearError:
            reject()
        assert nodes_of(tree) == expected
        assert (trees.counts[place], trees.sizes[place]) == (count, len(expected))
        # The trees of n-grams that nothing follows are of no use, and nobody asks for their followers.
        assert trees.distinct[place] == (reference.followers(documents, ngram) if expected else 0)


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
        assert nodes_of(tree_at(trees, place)) == expected
        assert trees.counts[place] == count
        assert trees.distinct[place] == (reference.followers(documents, ngram) if followed else 0)


def test_every_occurrence_is_read_however_many() -> None:
    """REST reads 1,024 evenly spaced rows; here a token that follows once in 4,000 has a node of its own."""
    followers = [1] * 2_500 + [2] * 1_490 + list(range(3, 13))
    np.random.default_rng(6).shuffle(followers)
    documents = [[0, follower, 0] for follower in followers]
    corpus = [documents[:500], documents[500:501], documents[501:]]
    trees = cut_trees(make_index(corpus, 20), matrix([(0,)]), 64, 1)
    counts = Counter(followers)
    expected = sorted((level_of(count / 8_000), token) for token, count in counts.items())
    tree = tree_at(trees, 0)
    assert list(zip(tree.levels.tolist(), tree.tokens.tolist(), strict=True)) == expected
    assert (trees.counts[0], trees.distinct[0]) == (8_000, 13)


def test_absent_ngrams_have_no_tree() -> None:
    index = make_index([[[1, 2, 3]]], NARROW)
    trees = cut_trees(index, matrix([(2, 1), (4, 4), (1, 2)]), 8, 10)
    assert (trees.counts.tolist(), trees.sizes.tolist()) == ([0, 0, 1], [0, 0, 1])
    none = cut_trees(index, np.empty((0, 2), np.int32), 8, 10)
    assert [len(array) for array in none] == [0] * 6


@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1])
def test_blocks_and_workers_do_not_show(size: int) -> None:
    rng = np.random.default_rng(8)
    documents = [((rng.zipf(1.3, 400) - 1) % 60).tolist() for _ in range(10)]
    index = make_index([documents[:3], documents[3:]], 60)
    ngrams = matrix(reference.most_common(documents, 2, size))
    trees = cut_trees(index, ngrams, 16, 10, workers=1)
    order = rng.permutation(size)
    others = cut_trees(index, ngrams[order], 16, 10, workers=7)
    assert len(trees.sizes) == len(others.sizes) == size
    for place, other in enumerate(order.tolist()):
        assert tree_at(others, place) == tree_at(trees, other)
        assert others.counts[place] == trees.counts[other]
        assert others.distinct[place] == trees.distinct[other]


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
