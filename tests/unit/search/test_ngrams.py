from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.search.ngrams import MAX_N, NgramTable, add_tables, count_ngrams, token_ranges
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.rest.store import RestStore
from tests import reference
from tests.examples import examples
from tests.reference import Documents, Ngram, make_index
from tests.unit.search.test_expand import Corpus, corpora, documents_of

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
@examples(150)
@given(st.data(), st.integers(1, MAX_N), st.integers(1, 12) | st.just(1 << 22), st.integers(1, 3))
def test_counts_are_exact_and_ascend(
    vocab_size: int, data: st.DataObject, max_n: int, part_rows: int, workers: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    index = make_index(corpus, vocab_size)
    assert counted(index, max_n, part_rows, workers) == expected(documents_of(corpus), max_n)


@given(corpora(), st.integers(1, MAX_N), st.integers(1, 5))
def test_segments_do_not_show(corpus: Corpus, max_n: int, part_rows: int) -> None:
    single = [[document] for document in documents_of(corpus)]
    found = counted(make_index(single, 5), max_n, part_rows)
    assert found == counted(make_index([documents_of(corpus)], 5), max_n, 1 << 22)


@pytest.mark.parametrize(
    "documents", [[[]], [[], [], []], [[3]], [[3], [3], []], [[4, 4, 4, 4, 4, 4, 4, 4, 4]], [[0, 1], [1, 0]]]
)
def test_hardly_any_text(documents: Documents) -> None:
    for corpus in ([documents], [[document] for document in documents]):
        for part_rows in (1, 100):
            assert counted(make_index(corpus, 5), MAX_N, part_rows) == expected(documents, MAX_N)


def test_rich_text_in_many_segments() -> None:
    rng = np.random.default_rng(1)
    documents = [((rng.zipf(1.4, rng.integers(0, 300)) - 1) % 900).tolist() for _ in range(60)]
    corpus = [documents[:1], documents[1:30], documents[30:31], documents[31:]]
    want = expected(documents, MAX_N)
    for part_rows in (1, 977, 1 << 22):
        assert counted(make_index(corpus, 900), MAX_N, part_rows) == want


def test_the_example_of_the_module() -> None:
    index = make_index([[[5, 7, 5, 7, 9]]], 10)
    assert counted(index, 2, 1 << 22) == [
        [((5,), 2), ((7,), 2), ((9,), 1)],
        [((5, 7), 2), ((7, 5), 1), ((7, 9), 1)],
    ]


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
    told: list[int] = []
    parts = list(count_ngrams(index, 3, part_rows=2, workers=2, on_rows=told.append))
    assert len(told) == len(parts) > 1
    assert sum(told) == sum(map(len, documents))


NGRAMS = st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.integers(1, 2**40), max_size=8)


@examples(200)
@given(NGRAMS, NGRAMS)
def test_tables_add_up(left: dict[Ngram, int], right: dict[Ngram, int]) -> None:
    merged = NgramTable(*add_tables(*table_of(left), *table_of(right)))
    both = {ngram: left.get(ngram, 0) + right.get(ngram, 0) for ngram in left.keys() | right.keys()}
    assert table_counts(merged) == sorted(both.items())


def table_of(counts: dict[Ngram, int]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    rows: Sequence[tuple[Ngram, int]] = sorted(counts.items())
    tokens = np.array([ngram for ngram, _ in rows], np.uint16).reshape(-1, 2)
    return tokens, np.array([count for _, count in rows], np.int64)


def test_real_text_as_polars_counts_it(real_store: Path) -> None:
    """The same rows as a group-by over every run of n tokens, in several segments and many parts."""
    index = RestStore.open(real_store).index
    assert len(index.segments) > 2
    for n, parts in enumerate(zip(*count_ngrams(index, 5, part_rows=50_000), strict=True), 1):
        runs = np.lib.stride_tricks.sliding_window_view(index.tokens, n)
        runs = runs[(runs < index.vocab_size).all(axis=1)]
        names = [f"t{j + 1}" for j in range(n)]
        want = pl.DataFrame(dict(zip(names, runs.T, strict=True))).group_by(names).len("count").sort(names)
        found = pl.DataFrame(
            {name: np.concatenate([part.tokens[:, j] for part in parts]) for j, name in enumerate(names)}
        )
        found = found.with_columns(count=np.concatenate([part.counts for part in parts]))
        assert found.equals(want.cast({"count": pl.Int64}))
        assert found["count"].sum() == len(runs)
