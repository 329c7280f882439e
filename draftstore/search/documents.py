"""In how many documents n-grams occur: kernels over plain arrays, no files.

The document of a position is the first one that ends at or behind it. A table says which that is for every 64th
position; from there, few documents end before the one looked for.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import CORES, kernel
from draftstore.search.suffix import SuffixIndex, find_rows

STRIDE = 64


class DocumentTable(NamedTuple):
    """Where the documents of a store end; positions count over all segments.

    Attributes:
        ends: int64 [documents], position of the sentinel behind each, ascending.
        firsts: int64 [ceil(tokens / 64)], first document that ends at or behind every 64th position.
    """

    ends: NDArray[np.int64]
    firsts: NDArray[np.int64]


def document_table(index: SuffixIndex) -> DocumentTable:
    """Find the documents of a store."""
    ends = np.flatnonzero(index.tokens >= index.vocab_size)
    return DocumentTable(ends, np.searchsorted(ends, np.arange(0, len(index.tokens), STRIDE)))


def count_documents(
    index: SuffixIndex, table: DocumentTable, ngrams: NDArray[np.int64], workers: int | None = None
) -> NDArray[np.int64]:
    """Return int64 [k]: in how many documents each n-gram occurs.

    Args:
        index: the arrays of the store.
        table: its documents.
        ngrams: int64 [k, n].
        workers: threads; all cores by default.
    """
    threads = workers or CORES
    with ThreadPoolExecutor(threads) as pool:
        # Each thread takes every so many-th n-gram: neighbours in token order are alike common.
        parts = pool.map(lambda thread: _count(index, table, ngrams, thread, threads), range(threads))
        counts: NDArray[np.int64] = np.sum(list(parts), axis=0)
        return counts


@kernel
def _count(index: Any, table: Any, ngrams: Any, first: Any, step: Any) -> Any:
    """Return int64 [k]: the documents of every `step`-th n-gram from `first` on, 0 for the others."""
    counts = np.zeros(len(ngrams), np.int64)
    stamps = np.full(len(table.ends), -1, np.int64)
    n = ngrams.shape[1]
    for i in range(first, len(ngrams), step):
        for segment in range(len(index.segments)):
            base = index.segments[segment, 0]
            lo = np.int64(index.first_rows[segment, ngrams[i, 0]])
            hi = np.int64(index.first_rows[segment, ngrams[i, 0] + 1])
            if n > 1 and lo < hi:
                lo, hi = find_rows(index, segment, lo, hi, 1, ngrams[i], 0, n)
            for row in range(lo, hi):
                position = np.int64(index.suffixes[base + row])
                if position < 0 or position >= index.segments[segment, 1]:
                    continue  # a damaged store must not crash its reader
                position += base
                document = table.firsts[position // STRIDE]
                while document < len(stamps) and table.ends[document] < position:
                    document += 1
                if document < len(stamps):
                    counts[i] += stamps[document] != i
                    stamps[document] = i
    return counts
