from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.search.ngrams import MAX_N, NgramTable, count_ngrams, token_ranges
from draftstore.search.suffix import SuffixIndex
from tests import reference
from tests.reference import Documents, Ngram, make_index
from tests.unit.search.test_expand import corpora, documents_of

VOCABULARIES = [5, 65_535, 151_665]
"""A few ids, the most of u16, u32; tests use the highest ids of each."""


def table_counts(table: NgramTable) -> list[tuple[Ngram, int]]:
    ngrams = [tuple(ngram) for ngram in table.tokens.tolist()]
    return list(zip(ngrams, table.counts.tolist(), strict=True))


def counted(
    index: SuffixIndex, max_n: int, part_rows: int, workers: int = 2
) -> list[list[tuple[Ngram, int]]]:
    """Return what is counted of each length, all parts joined."""
    found: list[list[tuple[Ngram, int]]] = [[] for _ in range(max_n)]
    for tables in count_ngrams(index, max_n, part_rows=part_rows, workers=workers):
        assert len(tables) == max_n
        for n, (table, place) in enumerate(zip(tables, found, strict=True), 1):
            assert table.tokens.shape == (len(table.counts), n)
            assert (table.tokens.dtype, table.counts.dtype) == (index.tokens.dtype, np.dtype(np.int64))
            place += table_counts(table)
    return found


def expected(documents: Documents, max_n: int) -> list[list[tuple[Ngram, int]]]:
    return [sorted(reference.ngram_counts(documents, n).items()) for n in range(1, max_n + 1)]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@given(st.data(), st.integers(1, MAX_N), st.integers(1, 12) | st.just(1 << 22), st.integers(1, 3))
def test_counts_are_exact_and_ascend(
    vocab_size: int, data: st.DataObject, max_n: int, part_rows: int, workers: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    index = make_index(corpus, vocab_size)
    assert counted(index, max_n, part_rows, workers) == expected(documents_of(corpus), max_n)


def test_rich_text_in_many_segments() -> None:
    rng = np.random.default_rng(1)
    documents = [((rng.zipf(1.4, rng.integers(0, 300)) - 1) % 900).tolist() for _ in range(60)]
    corpus = [documents[:1], documents[1:30], documents[30:31], documents[31:]]
    want = expected(documents, MAX_N)
    for part_rows in (1, 977, 1 << 22):
        assert counted(make_index(corpus, 900), MAX_N, part_rows) == want


@given(st.lists(st.lists(st.integers(0, 6), max_size=12), min_size=1, max_size=4), st.integers(1, 40))
def test_ranges_are_bounded_and_hold_every_token_once(documents: Documents, part_rows: int) -> None:
    index = make_index([[document] for document in documents], 7)
    ranges = list(token_ranges(index, part_rows))
    assert [first for first, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
    assert ranges[-1][1] == 7
    rows = [sum(document.count(token) for document in documents) for token in range(7)]
    for first, stop in ranges:
        assert stop - first == 1 or sum(rows[first:stop]) <= part_rows
    for (first, stop), (_, after) in pairwise(ranges):  # none could be longer
        assert sum(rows[first : stop + 1]) > part_rows or after == stop


def test_progress_tells_every_row_once() -> None:
    documents = [[1, 2, 3], [3, 3], [4]]
    index = make_index([documents[:1], documents[1:]], 5)
    told: list[tuple[int, int]] = []
    parts = list(count_ngrams(index, 3, part_rows=2, workers=2, on_rows=lambda *done: told.append(done)))
    assert len(told) == len(set(told)) == len(parts) > 1
    assert told[-1] == (sum(map(len, documents)), len(index.suffixes))
