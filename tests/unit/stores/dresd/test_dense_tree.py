import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.jit import read_only
from draftstore.stores.dresd.kernels.dense_tree import CALIBRATION, Calibration, draw_tree, new_scratch
from draftstore.text.tokens import sentinel, token_dtype
from draftstore.trees.frontier import new_frontier, unpack_nodes
from draftstore.trees.tree import DraftTree
from tests import reference
from tests.reference import Documents, Ngram, UnclearError, nodes_of

VOCAB = 6
similarities = st.sampled_from(
    [-1.0, -0.25, 0.0, 0.5, 0.8125, 0.875, 0.96875, 0.9921875, 1.0]
)  # exact as float32
calibrations = st.sampled_from(
    [
        CALIBRATION,
        Calibration(0.3, 0.01, 0.5, 1.0),
        Calibration(1.0, 1.0, 1e-6, 0.1),
        Calibration(0.01, 3.0, 2.0, 0.9),
    ]
)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[NDArray[np.unsignedinteger], list[int]]:
    """Draw a corpus of a few documents, and places in it where continuations begin, of which some are sentinels."""
    token = st.sampled_from([0, 1, VOCAB - 1])
    documents = draw(st.lists(st.lists(token, max_size=12), min_size=1, max_size=5))
    tokens = corpus(documents)
    return tokens, draw(st.lists(st.integers(0, len(tokens) - 1), min_size=1, max_size=12))


def corpus(documents: Documents, vocab_size: int = VOCAB) -> NDArray[np.unsignedinteger]:
    dtype = token_dtype(vocab_size)
    return read_only(np.array(reference.closed(documents, sentinel(dtype)), dtype))


def drawn(
    tokens: NDArray[np.unsignedinteger],
    starts: list[int],
    near: list[float],
    length: int = 10,
    budget: int = 64,
    max_level: int = 255,
    calibration: Calibration = CALIBRATION,
    vocab_size: int = VOCAB,
) -> DraftTree:
    best = new_frontier(budget)
    size = draw_tree(
        tokens,
        vocab_size,
        calibration,
        np.array(starts, np.int64),
        np.array(near, np.float32),
        length,
        new_scratch(len(starts), length, budget),
        best,
        max_level,
    )
    tree = DraftTree(np.empty(size, np.int32), np.empty(size, np.int16), np.empty(size, np.uint8))
    unpack_nodes(best, size, tree.tokens, tree.parents, tree.levels)
    tree.validate()
    return tree


def continuations(tokens: NDArray[np.unsignedinteger], starts: list[int], length: int) -> list[Ngram]:
    return [reference.rest_of_document(tokens, start, length) for start in starts]


@given(corpora(), st.data(), st.integers(1, 8), st.integers(1, 40), st.integers(0, 255), calibrations)
def test_continuations_become_the_tree_of_the_oracle(
    text: tuple[NDArray[np.unsignedinteger], list[int]],
    data: st.DataObject,
    length: int,
    budget: int,
    max_level: int,
    calibration: Calibration,
) -> None:
    tokens, starts = text
    near = data.draw(st.lists(similarities, min_size=len(starts), max_size=len(starts)))
    pairs = list(zip(near, continuations(tokens, starts, length), strict=True))
    try:
        expected = reference.dense_tree(pairs, calibration, budget, max_level)
    except UnclearError:
        reject()
    assert nodes_of(drawn(tokens, starts, near, length, budget, max_level, calibration)) == expected


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 151_665, 2**31 - 1])
def test_large_vocabularies(vocab_size: int) -> None:
    ids = [vocab_size - 1, 0, vocab_size - 2, vocab_size - 1]
    tokens = corpus([ids, [5]], vocab_size)
    assert tokens.dtype == (np.uint16 if vocab_size == 65_535 else np.uint32)
    tree = drawn(tokens, [0, 2], [1.0, 0.5], vocab_size=vocab_size)
    assert sorted(tree.tokens.tolist()) == sorted([*ids, *ids[2:]])
