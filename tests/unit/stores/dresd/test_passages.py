from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.stores.dresd.kernels import passages as passages_module
from draftstore.stores.dresd.kernels.passages import OVERLAP, Passages, cut_windows, find_passages
from tests.reference import dense_places

END = 65_535
LISTS = st.lists(st.lists(st.integers(0, 2), max_size=60), min_size=1, max_size=8)


def closed(documents: list[list[int]]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """Return tokens.bin of some documents, and where each starts."""
    tokens = list(chain.from_iterable([*document, END] for document in documents))
    return np.array(tokens, np.uint16), np.cumsum([0, *(len(document) + 1 for document in documents)])


def entries(passages: Passages) -> list[tuple[int, int]]:
    """Return document and place of all entries, in the order of the blocks."""
    places = [passages.places(block) - 2 for block in range(len(passages.blocks) - 1)]
    where = np.concatenate([np.empty(0, np.int64), *places])
    documents = np.searchsorted(passages.starts, where, side="right") - 1
    return list(zip(documents.tolist(), (where - passages.starts[documents]).tolist(), strict=True))


@given(documents=LISTS, window=st.integers(1, 70), alike=st.integers(1, 4))
def test_every_entry_once(documents: list[list[int]], window: int, alike: int) -> None:
    passages = find_passages(*closed(documents), window, alike)
    expected = dense_places(documents, alike)
    assert entries(passages) == expected
    assert passages.total == len(expected)
    assert passages.repeated == sum(max(len(document) - 2, 0) for document in documents) - len(expected)


@given(
    documents=LISTS,
    window=st.integers(2, 40),
    size=st.integers(1, 50),
    bos=st.lists(st.integers(0, 2), max_size=2),
)
def test_texts_of_blocks(documents: list[list[int]], window: int, size: int, bos: list[int]) -> None:
    """Whatever the blocks, each entry's row is that of its token, and the text before it is its document's."""
    tokens, starts = closed(documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passages_module, "BLOCK_TOKENS", size)
        passages = find_passages(tokens, starts, window)
    assert entries(passages) == dense_places(documents)
    sizes = []
    for block, (first, last) in enumerate(pairwise(passages.blocks.tolist())):
        assert first < last
        texts, rows = passages.texts(block, tokens, tuple(bos))
        sizes.append(passages.tokens_of([block]))
        places = iter(passages.places(block).tolist())
        for text, row in zip(texts, rows.tolist(), strict=True):
            assert len(text) <= window + len(bos)
            assert text[: len(bos)].tolist() == bos
            for column in range(row, len(text)):
                place = next(places) - 2
                document = int(np.searchsorted(starts, place, side="right")) - 1
                before = tokens[starts[document] : place + 1].tolist()
                read = text[len(bos) : column + 1].tolist()
                assert before[len(before) - len(read) :] == read
        assert next(places, None) is None
    assert all(total < size + window for total in sizes)
    assert passages.tokens_of(range(len(sizes))) == sum(sizes)


def test_a_document_that_begins_with_bos_does_not_get_it_twice() -> None:
    tokens, starts = closed([[5, 1, 2, 3], [1, 2, 3, 4], [5, 1, 1, 2, 4, 3, 2]])
    passages = find_passages(tokens, starts, 3)
    texts, rows = passages.texts(0, tokens, (5,))
    assert [text.tolist() for text in texts] == [[5, 1], [5, 1, 2], [5, 1, 1], [5, 2, 4]]
    assert rows.tolist() == [0, 1, 0, 1]


@given(length=st.integers(0, 200), size=st.integers(1, 50))
def test_windows_count_every_position_once(length: int, size: int) -> None:
    windows = list(cut_windows(length, size))
    assert [place for window in windows for place in range(window.first, window.stop)] == list(range(length))
    for window in windows:
        assert 0 <= window.start <= window.first < window.stop <= length
        assert window.stop - window.start <= size
        assert window.first - window.start == min(window.first, size // OVERLAP)
