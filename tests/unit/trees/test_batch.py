"""Batched drafts of many contexts: the same bytes as one tree at a time, and nothing malformed gets through."""

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.trees.batch import DraftBatch, decode_drafts, rows_and_mask
from draftstore.trees.codec import MAX_NODES
from draftstore.trees.tree import DraftTree
from tests.unit.trees.test_tree import ANIMALS, trees


def slow_bytes(tree: DraftTree) -> bytes:
    """Encode a tree number by number."""
    n = len(tree)
    wide_tokens = any(token > 0xFFFF for token in tree.tokens.tolist())
    wide_parents = n > 256
    return b"".join(
        [
            struct.pack("<BBH", 1, wide_tokens + 2 * wide_parents, n),
            struct.pack(f"<{n}{'I' if wide_tokens else 'H'}", *tree.tokens.tolist()),
            struct.pack(
                f"<{n}{'H' if wide_parents else 'B'}", *[parent + 1 for parent in tree.parents.tolist()]
            ),
            struct.pack(f"<{n}B", *tree.levels.tolist()),
        ]
    )


def batch_of(forest: list[DraftTree], width: int) -> DraftBatch:
    """Lay trees into rows; what follows a tree is filled with what must not matter."""
    tokens = np.full((len(forest), width), 99_999, np.int32)
    parents = np.full((len(forest), width), 77, np.int16)
    levels = np.full((len(forest), width), 5, np.uint8)
    for row, tree in enumerate(forest):
        tokens[row, : len(tree)], parents[row, : len(tree)] = tree.tokens, tree.parents
        levels[row, : len(tree)] = tree.levels
    numbers = np.arange(len(forest))
    sizes = np.array([len(tree) for tree in forest], np.int32)
    return DraftBatch(tokens, parents, levels, sizes, numbers.astype(np.int32), numbers * 10)


def decoded(
    data: bytes, parts: list[bytes], vocab_size: int, budget: int = MAX_NODES, head: bytes = b""
) -> list[DraftTree]:
    """Decode the trees in `data`, of the sizes of `parts`, and return them one by one."""
    size, numbers = len(parts), range(len(parts))
    table = struct.pack(f"<{3 * size}I", *map(len, parts), *numbers, *(10 * number for number in numbers))
    batch = decode_drafts(head + table + data, len(head), size, vocab_size, budget)
    assert (
        batch.tokens.shape == batch.parents.shape == batch.levels.shape == (size, batch.sizes.max(initial=0))
    )
    assert [draft[1:] for draft in batch.drafts()] == [(i, 10 * i, "no_match") for i in range(size)]
    return [draft.tree for draft in batch.drafts()]


@given(st.lists(trees(), max_size=6), st.integers(0, 5))
def test_a_batch_is_encoded_as_each_tree_by_itself(forest: list[DraftTree], more: int) -> None:
    batch = batch_of(forest, max([len(tree) for tree in forest], default=0) + more)
    lengths, data = batch.encode_trees()
    parts = [slow_bytes(tree) for tree in forest]
    assert lengths.tolist() == [len(part) for part in parts]
    assert bytes(data) == b"".join(parts)
    assert [draft.tree for draft in batch.drafts()] == forest
    assert [draft[1:3] for draft in batch.drafts()] == [(i, 10 * i) for i in range(len(forest))]


@given(st.lists(trees(), max_size=6), st.binary(max_size=9))
def test_decoding_gives_the_trees_back(forest: list[DraftTree], head: bytes) -> None:
    parts = [slow_bytes(tree) for tree in forest]
    assert decoded(b"".join(parts), parts, 2**31, head=head) == forest


@given(st.lists(trees(), max_size=6), st.lists(st.integers(0, 6), max_size=3))
def test_parts_join_to_their_batch(forest: list[DraftTree], cuts: list[int]) -> None:
    whole = batch_of(forest, max([len(tree) for tree in forest], default=0))
    bounds = [0, *sorted(min(cut, len(forest)) for cut in cuts), len(forest)]
    parts = []
    for begin, end in pairwise(bounds):
        width = int(whole.sizes[begin:end].max(initial=0))
        trees: Any = (rows[begin:end, :width] for rows in whole[:3])
        arrays: Any = (array[begin:end] for array in whole[3:6])
        parts.append(DraftBatch(*trees, *arrays)._replace(reason="skipped"))
    assert DraftBatch.joined(parts).drafts() == whole._replace(reason="skipped").drafts()


@given(st.integers(0, 3), st.integers(0, 6), st.data())
def test_decoding_checks_every_guarantee(flags: int, n: int, data: st.DataObject) -> None:
    ids, places = st.integers(0, 3), st.integers(0, n)
    body = b"".join(
        [
            struct.pack(f"<{n}{'I' if flags & 1 else 'H'}", *[data.draw(ids) for _ in range(n)]),
            struct.pack(f"<{n}{'H' if flags & 2 else 'B'}", *[data.draw(places) for _ in range(n)]),
            bytes(sorted(data.draw(ids) for _ in range(n))),
        ]
    )
    tree = struct.pack("<BBH", 1, flags, n) + body
    try:
        found = DraftTree.from_bytes(tree)
        nodes = list(zip(found.levels, found.depths, found.tokens, found.parents, strict=True))
        siblings = {node[2:] for node in nodes}
        valid = nodes == sorted(nodes) and len(siblings) == n
    except DraftTreeError:
        valid = False
    if valid:
        assert decoded(tree, [tree], 4) == [found]
    else:
        with pytest.raises(DraftTreeError):
            decoded(tree, [tree], 4)


def test_wrong_batches_name_the_tree() -> None:
    data = ANIMALS.to_bytes()
    two, most = [data, data], int(ANIMALS.tokens.max())
    assert decoded(data + data, two, most + 1, len(ANIMALS)) == [ANIMALS] * 2
    with pytest.raises(DraftTreeError, match="tree 1 of 2: a token id lies outside the vocabulary"):
        decoded(data + data, two, most)
    with pytest.raises(DraftTreeError, match="tree 1 of 2: 4 nodes, more than requested"):
        decoded(data + data, two, most + 1, len(ANIMALS) - 1)
    with pytest.raises(DraftTreeError, match="tree 2 of 2: a draft tree of 4 nodes takes 20 bytes"):
        decoded(data + data[:-1], two, most + 1)
    with pytest.raises(DraftTreeError, match="more than the 2 trees take"):
        decoded(data + data + b"\0", two, most + 1)


def expected(tree: DraftTree, last: int, rows: int) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the rows of one text, slowly: a path from row 0 for each row."""
    above, tokens = [-1], [last]
    for row in range(1, rows):
        above.append(int(tree.parents[row - 1]) + 1 if row <= len(tree) else row - 1)
        tokens.append(int(tree.tokens[row - 1]) if row <= len(tree) else tokens[-1])
    mask = np.zeros((rows, rows), np.bool_)
    for row in range(rows):
        column = row
        while column >= 0:
            mask[row, column] = True
            column = above[column]
    return tokens, mask


@given(st.lists(trees(12), max_size=4), st.integers(1, 16))
def test_arrays_are_those_of_the_reference(drafts: Sequence[DraftTree], rows: int) -> None:
    lasts = [100 + place for place in range(len(drafts))]
    batch = DraftBatch.of([(tree.tokens, tree.parents, tree.levels, 0, 0) for tree in drafts])
    tokens, mask = rows_and_mask(batch, lasts, rows)
    assert (tokens.dtype, mask.dtype) == (np.dtype("int64"), np.dtype("bool"))
    assert (tokens.shape, mask.shape) == ((len(drafts) * rows,), (len(drafts) * rows * rows,))
    for place, (draft, last) in enumerate(zip(drafts, lasts, strict=True)):
        want_tokens, want_mask = expected(draft, last, rows)
        assert tokens.reshape(-1, rows)[place].tolist() == want_tokens
        assert mask.reshape(-1, rows, rows)[place].tobytes() == want_mask.tobytes()
