"""Selection of the n-grams of a CREST store: a ranking by gain, of which a store holds the first part.

The gain of an n-gram g is what a drafter loses without g, when the longest suffix s that ranks before g answers
instead:

    c * trust(g) * (sum of P(v | g) over the nodes v of g's tree - the same over the nodes of s's tree) / 10^(n - 1)

The sum of the nodes' probabilities is the expected number of accepted tokens. c is the number of documents with g: text
repeated inside one document says little about others. The difference is measured on the very text that the trees were
cut from, so it is weighted as the drafting rule weights g: c / (c + beta * d + alpha), with d distinct continuations
(see `draftstore.search.expand`). An n-gram without such a suffix answers when nothing else would, and has full trust.

The power of ten is for texts that differ from the corpus: in those, long n-grams are rarer, but single tokens are as
common. It ranks nearly all tokens before the first bigrams, and bigrams before trigrams that save as much.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import CORES, kernel
from draftstore.search.cutting import Trees, cut_trees
from draftstore.search.expand import Rule
from draftstore.search.ngrams import NgramTable, count_ngrams
from draftstore.search.suffix import SuffixIndex, find_rows
from draftstore.storage.report import OnProgress, ignore
from draftstore.trees.tree import LEVEL_PROBS

POOL_FACTOR = 4
"""Number of n-grams whose gain is computed, per selected one."""
SHIFT = 0.1
"""Discount of an n-gram's gain on other texts, per token after its first; 0.3 gives similar results."""
STRIDE = 64
GAIN_NODES = 16
"""Nodes of the trees that gains are computed from; 64 give the same top n-grams."""


class Ranking(NamedTuple):
    """N-grams, best first.

    Attributes:
        tables: n-grams of each length from 1, ascending.
        lengths: uint8 [k], n of each n-gram.
        places: int64 [k], row of each in the table of its length.
    """

    tables: Sequence[NgramTable]
    lengths: NDArray[np.uint8]
    places: NDArray[np.int64]


def frequent_ngrams(
    index: SuffixIndex, max_n: int, most: int, on_rows: OnProgress = ignore
) -> list[NgramTable]:
    """Return the most common n-grams of each length, at most `most` of each, in token order, which breaks ties."""
    pools: list[list[NgramTable]] = [[] for _ in range(max_n)]
    sizes = np.zeros(max_n, np.int64)
    for tables in count_ngrams(index, max_n, on_rows=on_rows):
        for place, table in enumerate(tables):
            pools[place].append(_most_common(table, most))
            sizes[place] += len(pools[place][-1].counts)
            if sizes[place] > 2 * most:
                pools[place] = [_most_common(_join(pools[place]), most)]
                sizes[place] = len(pools[place][0].counts)
    return [_most_common(_join(pool), most) for pool in pools]


def _join(tables: Sequence[NgramTable]) -> NgramTable:
    return NgramTable(*(np.concatenate(arrays) for arrays in zip(*tables, strict=True)))


def _most_common(table: NgramTable, most: int) -> NgramTable:
    """Return the most common n-grams of a table in its order, as a copy, so that the table's memory can be freed."""
    places = np.sort(np.argsort(-table.counts, kind="stable")[:most])
    return NgramTable(table.tokens[places], table.counts[places])


def rank_ngrams(
    index: SuffixIndex, max_n: int, most: int, rule: Rule, on_rows: OnProgress = ignore
) -> Ranking:
    """Rank n-grams of up to `max_n` tokens by their gain, for a rule's depth, alpha and beta."""
    pool = most * POOL_FACTOR
    tables = _candidates(frequent_ngrams(index, max_n, pool, on_rows), pool)
    scores = _gains(index, tables, rule)
    lengths = np.concatenate([np.full(len(table.counts), n, np.uint8) for n, table in enumerate(tables, 1)])
    places = np.concatenate([np.arange(len(table.counts)) for table in tables])
    best = np.lexsort((places, lengths, -np.concatenate(scores)))[:most]
    return Ranking(tables, lengths[best], places[best])


def _candidates(tables: Sequence[NgramTable], most: int) -> list[NgramTable]:
    """Return n-grams whose gain is worth computing: the most common ones, and all tokens that occur more than once."""
    # Suffixes of a common n-gram are at least as common and thus included.
    counts = np.sort(np.concatenate([table.counts for table in tables]))
    least = counts[-most] if most < len(counts) else 0
    bounds = [min(least, 2), *[least] * (len(tables) - 1)]
    pairs = zip(tables, bounds, strict=True)
    return [NgramTable(*(array[table.counts >= bound] for array in table)) for table, bound in pairs]


def _gains(index: SuffixIndex, tables: Sequence[NgramTable], rule: Rule) -> list[NDArray[np.float64]]:
    gains: list[NDArray[np.float64]] = []
    trees: list[Trees] = []
    documents = document_table(index)
    for n, table in enumerate(tables, 1):
        own = cut_trees(index, np.ascontiguousarray(table.tokens, np.int32), GAIN_NODES, rule.depth)
        trees.append(own)
        nodes = np.arange(GAIN_NODES) < own.sizes[:, None]
        sums = np.where(nodes, LEVEL_PROBS[own.levels], 0).sum(axis=1, dtype=np.float64)
        counts = count_documents(index, documents, np.ascontiguousarray(table.tokens, np.int64))
        worth = counts * SHIFT ** (n - 1)
        gain = worth * sums
        trusted = worth * (counts / (counts + rule.beta * own.distinct + rule.alpha))
        waiting = np.ones(len(gain), np.bool_)
        for shorter in range(n - 1, 0, -1):
            suffixes = find_ngrams(
                tables[shorter - 1].tokens, np.ascontiguousarray(table.tokens[:, n - shorter :])
            )
            shared = shared_sums(own, trees[shorter - 1], suffixes)
            less = trusted * (sums - shared)
            # The suffix replaces the n-gram only if it ranks before it.
            settled = waiting & (suffixes >= 0)
            settled[settled] = less[settled] <= gains[shorter - 1][suffixes[settled]]
            gain[settled] = less[settled]
            waiting &= ~settled
        gains.append(gain)
    return gains


class DocumentTable(NamedTuple):
    """The documents of a store; positions count over all segments.

    The document of a position is the first one that ends at or after it. The table holds it for every 64th position;
    few documents end between there and the position.

    Attributes:
        ends: int64 [documents], position of each document's sentinel, ascending.
        firsts: int64 [ceil(tokens / 64)], first document that ends at or after every 64th position.
    """

    ends: NDArray[np.int64]
    firsts: NDArray[np.int64]


def document_table(index: SuffixIndex) -> DocumentTable:
    """Build the document table of a store."""
    ends = np.flatnonzero(index.tokens >= index.vocab_size)
    return DocumentTable(ends, np.searchsorted(ends, np.arange(0, len(index.tokens), STRIDE)))


def count_documents(index: SuffixIndex, table: DocumentTable, ngrams: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return int64 [k]: the number of documents with each n-gram of `ngrams`, int64 [k, n]."""
    with ThreadPoolExecutor(CORES) as pool:
        # Threads take interleaved n-grams: neighbours in token order have similar counts.
        parts = pool.map(lambda thread: _count(index, table, ngrams, thread, CORES), range(CORES))
        counts: NDArray[np.int64] = np.sum(list(parts), axis=0)
        return counts


@kernel
def _count(index, table, ngrams, first, step):
    """Return int64 [k]: the document counts of every `step`-th n-gram from `first` on, 0 for the others."""
    counts = np.zeros(len(ngrams), np.int64)
    stamps = np.full(len(table.ends), -1, np.int64)
    n = ngrams.shape[1]
    for i in range(first, len(ngrams), step):
        for segment in range(len(index.segments)):
            base = index.segments[segment, 0]
            lo = np.int64(index.first_rows[segment, ngrams[i, 0]])
            hi = np.int64(index.first_rows[segment, ngrams[i, 0] + 1])
            if n > 1 and lo < hi:
                lo, hi = find_rows(index, segment, lo, hi, ngrams[i], 0, n)
            for row in range(lo, hi):
                position = np.int64(index.suffixes[base + row])
                if position < 0 or position >= index.segments[segment, 1]:
                    continue  # a damaged store must not crash the process
                position += base
                document = table.firsts[position // STRIDE]
                while document < len(stamps) and table.ends[document] < position:
                    document += 1
                if document < len(stamps):
                    counts[i] += stamps[document] != i
                    stamps[document] = i
    return counts


@kernel
def find_ngrams(table, ngrams):
    """Return int64 [k], the row of each n-gram [k, n] in an ascending table [rows, n]; -1 if absent."""
    found = np.empty(len(ngrams), np.int64)
    n = table.shape[1]
    for i in range(len(ngrams)):
        lo, hi = 0, len(table)
        while lo < hi:
            middle = (lo + hi) // 2
            j = 0
            while j < n and table[middle, j] == ngrams[i, j]:
                j += 1
            if j < n and table[middle, j] < ngrams[i, j]:
                lo = middle + 1
            else:
                hi = middle
        same = lo < len(table)
        for j in range(n):
            same = same and table[lo, j] == ngrams[i, j]
        found[i] = lo if same else -1
    return found


@kernel
def shared_sums(trees, others, places):
    """Return float64 [k], the summed probabilities of those nodes of each of k Trees that are also in another tree.

    `places` int64 [k] is the index of the tree among `others` to compare each one with; -1: none.
    """
    tokens, parents, levels, sizes = trees.tokens, trees.parents, trees.levels, trees.sizes
    sums = np.zeros(len(sizes), np.float64)
    twins = np.empty(others.tokens.shape[1], np.int64)  # the node of the first tree with the same path, or -2
    for i in range(len(sizes)):
        other = places[i]
        if other < 0:
            continue
        for node in range(others.sizes[other]):
            above = others.parents[other, node]
            parent = np.int64(-1) if above < 0 else twins[above]
            twins[node] = -2
            if parent == -2:
                continue
            for twin in range(sizes[i]):
                if parents[i, twin] == parent and tokens[i, twin] == others.tokens[other, node]:
                    twins[node] = twin
                    sums[i] += LEVEL_PROBS[levels[i, twin]]
                    break
    return sums
