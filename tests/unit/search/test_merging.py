"""Merged suffixes against sorting everything again, compared to the depth that drafts use."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.errors import StoreError
from draftstore.search.merging import DEEPEST, Rows, merge_segment
from draftstore.search.suffix import index_segment, key_layout, key_table

VOCABULARY = 4
END = 65_535

Documents = list[tuple[bool, list[int]]]
documents = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)), max_size=12
)


def text_of(texts: list[list[int]]) -> np.ndarray:
    return np.array([token for text in texts for token in [*text, END]], np.uint16)


def visible(tokens: np.ndarray, position: Any) -> tuple[int, ...]:
    """Return what drafts see of a suffix: its tokens up to the end of the document."""
    seen = tokens[position : position + DEEPEST].tolist()
    return tuple(seen[: seen.index(END) + 1] if END in seen else seen)


def old_rows(tokens: np.ndarray) -> Rows:
    suffixes, _, first_rows = index_segment(tokens, VOCABULARY)
    return Rows(tokens, suffixes, first_rows)


def gaps_of(texts: Documents) -> np.ndarray:
    ends = np.cumsum([len(text) + 1 for _, text in texts])
    gaps = [(end - len(text) - 1, end) for end, (kept, text) in zip(ends, texts, strict=True) if not kept]
    return np.array(gaps, np.int64).reshape(-1, 2)


def assert_merged(old: Documents, new: list[list[int]], threads: int) -> None:
    tokens = text_of([text for kept, text in old if kept] + new)
    suffixes = np.empty(len(tokens), np.int32)
    before = old_rows(text_of([text for _, text in old]))
    keys, first_rows = merge_segment(before, gaps_of(old), tokens, suffixes, threads)
    assert sorted(suffixes.tolist()) == list(range(len(tokens)))
    expected, _, expected_rows = index_segment(tokens, VOCABULARY)
    assert [visible(tokens, row) for row in suffixes] == [visible(tokens, row) for row in expected]
    np.testing.assert_array_equal(first_rows, expected_rows)
    np.testing.assert_array_equal(keys, key_table(tokens, suffixes, VOCABULARY, *key_layout(VOCABULARY)))


@given(
    documents.filter(bool),
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)),
    st.integers(1, 3),
)
def test_rows_are_those_of_sorting_again(old: Documents, new: list[list[int]], threads: int) -> None:
    if new or any(kept for kept, _ in old):
        assert_merged(old, new, threads)


def test_many_documents_come_and_go() -> None:
    salad = random.Random(7)
    texts = [salad.choices(range(VOCABULARY), k=salad.randint(1, 60)) for _ in range(400)]
    old = [(salad.random() < 0.7, text) for text in texts]
    assert_merged(old, [[*salad.choice(texts), 1] for _ in range(60)], 2)


@pytest.mark.parametrize("damage", [-1, 7, 2**31 - 1])
def test_damaged_suffixes_are_refused(damage: int) -> None:
    tokens = text_of([[0, 1, 2], [1, 2]])
    old = old_rows(tokens)
    old.suffixes[0] = damage
    gaps = np.array([[4, 7]], np.int64)
    if damage == 7:
        old.suffixes[0] = 5  # of the removed document: a row too few
    with pytest.raises(StoreError, match="build the store again"):
        merge_segment(old, gaps, tokens[:4], np.empty(4, np.int32))
