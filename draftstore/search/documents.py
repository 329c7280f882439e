"""Document frequencies of n-grams.

The document of a position is the first one that ends at or after it. A table holds it for every 64th position; few
documents end between there and the position.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import CORES, kernel
from draftstore.search.suffix import SuffixIndex, find_rows

STRIDE = 64


class DocumentTable(NamedTuple):
    """The ends of a store's documents; positions count over all segments.

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
