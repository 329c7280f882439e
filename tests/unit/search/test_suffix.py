from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydivsufsort import divsufsort

from draftstore.errors import TokenRangeError
from draftstore.jit import read_only
from draftstore.search.sorting import MAX_SEGMENT_TOKENS, suffix_array
from draftstore.search.suffix import (
    SuffixIndex,
    find_rows,
    first_row_table,
    key_layout,
    key_table,
)
from draftstore.text.tokens import sentinel, token_dtype
from tests import reference

NARROW, WIDE = 40, 151_665
SIZES = [1, 3, 512, 65_535, WIDE]
"""Vocabularies whose keys hold 63, 31, 6, 3 and 3 tokens."""


def array_of(text: Sequence[int], vocab_size: int) -> NDArray[Any]:
    """Return tokens as a store holds them; -1 stands for the sentinel."""
    dtype = token_dtype(vocab_size)
    return read_only(np.array([sentinel(dtype) if token < 0 else token for token in text], dtype))


def spread(text: Sequence[int], vocab_size: int) -> list[int]:
    """Move small ids apart over a vocabulary, keeping their order as far as it has room."""
    return [token if token < 0 else vocab_size - 1 - min(7 - token, vocab_size - 1) for token in text]


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Draw a text that repeats itself over at most four ids, up to 7, and the sentinel."""
    alphabet = [*draw(st.sampled_from([[7], [0, 7], [5, 6, 7], [0, 1, 6, 7]])), -1]
    pieces = draw(st.lists(st.lists(st.sampled_from(alphabet), max_size=8), max_size=6))
    repeats = draw(st.lists(st.integers(1, 12), min_size=len(pieces), max_size=len(pieces)))
    return [token for piece, times in zip(pieces, repeats, strict=True) for token in piece * times]


# -- sorting -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
@given(text=texts())
@example(text=[])
@example(text=[-1])
@example(text=[3, 3])
@example(text=[-1] * 50)
@example(text=[7, 6] * 60 + [7])
@example(text=[1, 2, 3, -1] * 30)
def test_suffixes_come_in_order(vocab_size: int, text: list[int]) -> None:
    tokens = array_of(spread(text, vocab_size), vocab_size)
    found = suffix_array(tokens, vocab_size)
    assert found.dtype == np.int32
    assert found.tolist() == reference.sort_suffixes(tokens.tolist())


def long_texts(vocab_size: int) -> Iterator[NDArray[Any]]:
    """Yield random ids, documents of common words, one passage again and again, and a Fibonacci word."""
    rng, size = np.random.default_rng(1), 50_000
    yield rng.integers(0, vocab_size, size)
    text = (rng.zipf(1.3, size) - 1) % vocab_size
    text[rng.integers(0, size, size // 50)] = -1
    yield text
    text = np.resize(rng.integers(0, vocab_size, 37), size)
    text[rng.integers(0, size, 20)] = 0
    yield text
    a, b = [vocab_size - 1], [vocab_size - 1, 0]
    while len(b) < size:
        a, b = b, b + a
    yield np.array(b)


@pytest.mark.parametrize("vocab_size", [3, 65_535, WIDE])
def test_long_texts_sort_as_divsufsort_does(vocab_size: int) -> None:
    for text in long_texts(vocab_size):
        assert_sorted(array_of(text.tolist(), vocab_size), vocab_size)


def assert_sorted(tokens: NDArray[Any], vocab_size: int) -> None:
    suffixes = suffix_array(tokens, vocab_size)
    # Dense ranks keep the order and fit the types that divsufsort knows.
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int32)
    assert np.array_equal(suffixes, divsufsort(ranks))


def test_a_segment_that_rows_cannot_count_is_refused() -> None:
    huge = np.broadcast_to(np.uint16(0), MAX_SEGMENT_TOKENS + 1)
    with pytest.raises(TokenRangeError, match="at most 2,147,483,646 tokens, found 2,147,483,647"):
        suffix_array(huge, 1)


# -- tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab_size", "layout"),
    [(1, (1, 63)), (2, (2, 31)), (3, (2, 31)), (4, (3, 21)), (32_000, (15, 4)), (65_535, (16, 3)),
     (2**31 - 1, (31, 2))],
)  # fmt: skip
def test_keys_hold_as_many_tokens_as_fit(vocab_size: int, layout: tuple[int, int]) -> None:
    assert key_layout(vocab_size) == layout


@pytest.mark.parametrize("vocab_size", SIZES)
@given(text=texts())
def test_tables_describe_the_sorted_suffixes(vocab_size: int, text: list[int]) -> None:
    text = [*spread(text, vocab_size), -1]
    tokens = array_of(text, vocab_size)
    suffixes = suffix_array(tokens, vocab_size)
    bits, count = key_layout(vocab_size)
    packed = [vocab_size if token < 0 else token for token in text]
    expected = [
        reference.pack(packed[start : start + count], bits, count) for start in suffixes[::16].tolist()
    ]
    keys = key_table(tokens, read_only(suffixes), vocab_size, bits, count)
    assert keys.dtype == np.int64
    assert keys.tolist() == expected == sorted(expected)
    firsts = first_row_table(tokens, vocab_size)
    assert firsts.shape == (vocab_size + 1,)
    for token in {*packed, 0, vocab_size // 2, vocab_size}:
        assert firsts[token] == sum(other < token for other in packed)


# -- search --------------------------------------------------------------------------------------------------


def rows_found(index: SuffixIndex, segment: int, pattern: Sequence[int]) -> list[int]:
    """Search for a pattern that stands in the middle of a longer array."""
    around = np.array([-5, -5, *pattern, -5], np.int64)
    lo, hi = index.first_rows[segment, pattern[0] : pattern[0] + 2].tolist()
    if lo < hi:
        lo, hi = find_rows(index, segment, lo, hi, around, 2, 2 + len(pattern))
    return list(range(int(lo), int(hi)))


def split(text: Sequence[int]) -> list[list[int]]:
    """Cut a text at its sentinels into documents."""
    pieces: list[list[int]] = [[]]
    for token in text:
        if token < 0:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


@pytest.mark.parametrize("vocab_size", SIZES)
@given(
    segments=st.lists(texts(), min_size=1, max_size=3),
    places=st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 12) | st.integers(1, 80)), min_size=1, max_size=4
    ),
    noise=st.lists(st.sampled_from([0, 5, 6, 7]), min_size=1, max_size=9),
)
def test_the_rows_of_a_pattern_are_those_that_start_with_it(
    vocab_size: int, segments: list[list[int]], places: list[tuple[int, int]], noise: list[int]
) -> None:
    corpus = [split(spread(text, vocab_size)) for text in segments]
    index = reference.make_index(corpus, vocab_size)
    end = sentinel(index.tokens.dtype)
    joined = [token for documents in corpus for document in documents for token in document]
    slices = [joined[start % (len(joined) + 1) :][:size] for start, size in places]
    patterns = [pattern for pattern in slices if pattern]
    patterns += [
        spread(noise, vocab_size),
        *([*pattern, *spread(noise[:1], vocab_size)] for pattern in patterns),
    ]
    for segment, documents in enumerate(corpus):
        text = reference.closed(documents, end)
        for pattern in patterns:
            expected = reference.matching_rows(text, pattern)
            assert rows_found(index, segment, pattern) == expected


@pytest.mark.parametrize("vocab_size", [NARROW, WIDE])
def test_rows_are_counted_exactly_in_a_large_segment(vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    base = vocab_size - 30
    text = (base + (rng.zipf(1.4, 30_000) - 1) % 30).tolist()
    index = reference.make_index([[[base, base + 1]], [text]], vocab_size)
    tokens = np.array(text)
    for size in (1, 2, 3, 4, 6, 9, 13, 20):
        for start in rng.integers(0, len(text) - size, 40).tolist():
            pattern = text[start : start + size]
            windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
            expected = np.flatnonzero((windows == pattern).all(axis=1))
            found = rows_found(index, 1, pattern)
            starts = index.suffixes[3:][found]
            assert sorted(starts.tolist()) == expected.tolist()
