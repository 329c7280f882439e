"""Draft trees of n-grams, from the rows of a suffix array, on all cores.

A *cut* tree holds only what followed the n-gram: a node's probability is the number of times that its path follows the
n-gram, divided by the n-gram's occurrences. This is the rule `longest` with every row read. A *drawn* tree is the draft
of a rule with the n-gram as its context.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import CORES
from draftstore.search.expand import MAX_ROWS, Rule, draft_batch
from draftstore.search.suffix import SuffixIndex
from draftstore.trees.tree import LOWEST_LEVEL

BLOCK = 256


class Trees(NamedTuple):
    """The draft trees of k n-grams: arrays [k, nodes], left-aligned, and per n-gram [k].

    Attributes:
        counts: occurrences of each n-gram.
        distinct: distinct tokens that follow each n-gram, counting the end of a document as one; 0 without a tree.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int16]
    levels: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    counts: NDArray[np.int64]
    distinct: NDArray[np.int64]


def cut_trees(
    index: SuffixIndex, ngrams: NDArray[np.int32], nodes: int, depth: int, workers: int | None = None
) -> Trees:
    """Cut the trees of n-grams, int32 [k, n], that occur in a store."""
    n = ngrams.shape[1]
    rule = Rule(n, n, depth, rows=MAX_ROWS, floor=0.0, alpha=0.0, beta=0.0, gamma=0.0)
    return _draft(index, rule, ngrams, nodes, workers)


def draw_trees(
    index: SuffixIndex, rule: Rule, ngrams: NDArray[np.int32], nodes: int, workers: int | None = None
) -> Trees:
    """Draw by a rule the trees of n-grams, int32 [k, n], that occur in a store.

    As in `cut_trees`, counts and distinct tokens are exact, and an n-gram that no token follows has no tree.
    """
    exact = cut_trees(index, ngrams, 1, 1, workers)
    drawn = _draft(index, rule, ngrams, nodes, workers)
    sizes = np.where(exact.sizes > 0, drawn.sizes, 0)
    return drawn._replace(sizes=sizes, counts=exact.counts, distinct=exact.distinct)


def _draft(
    index: SuffixIndex, rule: Rule, ngrams: NDArray[np.int32], nodes: int, workers: int | None
) -> Trees:
    rule.check()
    packed = rule.pack()
    blocks = [ngrams[start : start + BLOCK] for start in range(0, max(len(ngrams), 1), BLOCK)]
    with ThreadPoolExecutor(workers or CORES) as pool:
        parts = list(pool.map(lambda block: draft_batch(*index, packed, block, nodes, LOWEST_LEVEL), blocks))
    tokens, parents, levels, sizes, _, counts, distinct = map(np.concatenate, zip(*parts, strict=True))
    return Trees(tokens, parents, levels, sizes.astype(np.int64), counts, distinct)
