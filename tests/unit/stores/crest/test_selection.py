import functools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from draftstore.search.expand import Rule
from draftstore.search.ngrams import count_ngrams
from draftstore.stores.crest import selection as selection_module
from draftstore.stores.crest.selection import (
    GAIN_NODES,
    POOL_FACTOR,
    Ranking,
    count_documents,
    document_table,
    frequent_ngrams,
    rank_ngrams,
)
from tests import reference
from tests.reference import Documents, Ngram, UnclearError, make_index
from tests.unit.search.test_expand import NARROW, WIDE, corpora, documents_of

RULE = Rule(1, 1, depth=4, rows=1, floor=0.0, alpha=1.37, beta=0.613, gamma=0.0)


def ranked(ranking: Ranking) -> list[Ngram]:
    pairs = zip(ranking.lengths.tolist(), ranking.places.tolist(), strict=True)
    return [tuple(ranking.tables[n - 1].tokens[place].tolist()) for n, place in pairs]


@given(corpora(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9))
def test_pools_are_cut_without_loss(corpus: list[Documents], max_n: int, most: int, part_rows: int) -> None:
    """However small the parts that are counted at a time, and however often the pools are cut."""
    with pytest.MonkeyPatch.context() as patch:
        counted = functools.partial(count_ngrams, part_rows=part_rows, workers=2)
        patch.setattr(selection_module, "count_ngrams", counted)
        tables = frequent_ngrams(make_index(corpus, NARROW), max_n, most)
    for n, table in enumerate(tables, 1):
        expected = sorted(reference.most_common(documents_of(corpus), n, most))
        assert [tuple(ngram) for ngram in table.tokens.tolist()] == expected
        counts = reference.ngram_counts(documents_of(corpus), n)
        assert table.counts.tolist() == [counts[ngram] for ngram in expected]


# -- gain ----------------------------------------------------------------------------------------------------


def assert_ranked_by(gains: dict[Ngram, float], found: list[Ngram]) -> None:
    """Check that gains descend; what is as good as equal may stand in any order."""
    values = [gains[ngram] for ngram in found]
    for before, after in pairwise(values):
        assert before > after or before == pytest.approx(after, rel=1e-9, abs=1e-9)
    left_out = [gain for ngram, gain in gains.items() if ngram not in set(found)]
    assert not left_out or max(left_out) <= values[-1] * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(st.data(), st.integers(1, 5), st.integers(1, 12) | st.just(500))
def test_gain_is_the_loss_without_an_ngram(
    vocab_size: int, data: st.DataObject, max_n: int, most: int
) -> None:
    corpus = data.draw(corpora(vocab_size))
    documents = documents_of(corpus)
    candidates = reference.gain_candidates(documents, max_n, most * POOL_FACTOR)
    try:
        gains = reference.ngram_gains(documents, candidates, GAIN_NODES, RULE.depth, RULE.alpha, RULE.beta)
    except UnclearError:
        reject()
    found = ranked(rank_ngrams(make_index(corpus, vocab_size), max_n, most, RULE))
    assert len(found) == min(most, len(candidates))
    assert len(set(found)) == len(found)
    assert_ranked_by(gains, found)


# -- its parts -----------------------------------------------------------------------------------------------


def test_documents_of_any_length_are_counted() -> None:
    """Long ones span many strides of the table, short ones share one."""
    rng = np.random.default_rng(3)
    lengths = [0, 1, 62, 63, 64, 65, 500, *[1] * 200, 127, 128, 129, *[0] * 150, 300]
    documents = [rng.integers(0, 4, length).tolist() for length in lengths]
    for corpus in ([documents], [documents[:5], documents[5:90], documents[90:]]):
        index = make_index(corpus, 4)
        for n in (1, 2, 3):
            counts = reference.document_counts(documents, n)
            ngrams = np.array(list(counts), np.int64)
            assert count_documents(index, document_table(index), ngrams).tolist() == list(counts.values())
