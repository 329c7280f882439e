"""Drafts of a batch of contexts as arrays, from kernels to the wire without an object per tree.

`rows_and_mask` returns what some engines verify: rows of tokens, and the rows that each row attends to.

    row      0     1     2     3     4     5            mask   1 . . . . .
    token    the   cat   dog   sat   sat   sat                 1 1 . . . .
    above    -     0     0     1     3     4                   1 . 1 . . .
             |     `-- the tree --'  `-------'                 1 1 . 1 . .
             last token              padding                   1 1 . 1 1 .
             of the text                                       1 1 . 1 1 1

Every text has the same number of rows. A shorter tree is padded with a chain below its last node, which is a leaf: a
padding row is a draft like any other, and siblings keep different tokens, on which exact sampling depends.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.jit import as_input, kernel, read_only
from draftstore.trees import codec
from draftstore.trees.codec import MAX_NODES
from draftstore.trees.tree import DraftTree, explain


class Draft(NamedTuple):
    """A draft tree, the length of the longest match in the store, in tokens, and the match's number of occurrences.

    `reason` is why the tree is empty, if it is; see `draftstore.drafting.outcomes`.
    """

    tree: DraftTree
    match_length: int
    match_count: int
    reason: str = "no_match"


class DraftBatch(NamedTuple):
    """The drafts of a batch of contexts.

    Attributes:
        tokens: int32 [batch, width], the nodes of every tree, left-aligned; parents and levels likewise.
        sizes: int32 [batch], nodes of each tree.
        match_lengths: int32 [batch], tokens of the longest match in the store.
        match_counts: int64 [batch], number of its occurrences.
        reason: why its empty trees are empty; see `draftstore.drafting.outcomes`.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int16]
    levels: NDArray[np.uint8]
    sizes: NDArray[np.int32]
    match_lengths: NDArray[np.int32]
    match_counts: NDArray[np.int64]
    reason: str = "no_match"

    @classmethod
    def empty(cls, batch: int, reason: str = "no_match") -> "DraftBatch":
        """Return empty drafts of `batch` contexts, as read-only arrays."""
        return cls(*_nothing(batch), *_no_matches(batch), reason)

    @classmethod
    def plain(cls, tokens: Any, parents: Any, levels: Any, sizes: Any) -> "DraftBatch":
        """Return drafts without matches in a store."""
        return cls(tokens, parents, levels, sizes, *_no_matches(len(sizes)))

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "DraftBatch":
        """Return drafts that were made one by one: tokens, parents, levels, match length and match count of each."""
        parts = [
            cls(
                np.array([tokens], np.int32), np.array([parents], np.int16), np.array([levels], np.uint8),
                np.array([len(tokens)], np.int32), np.array([match], np.int32), np.array([count], np.int64),
            )
            for tokens, parents, levels, match, count in rows
        ]  # fmt: skip
        return cls.joined(parts) if parts else cls.empty(0)

    @classmethod
    def of_trees(cls, trees: Sequence[DraftTree], reason: str = "no_match") -> "DraftBatch":
        """Return trees as a batch."""
        sizes = np.array([len(tree) for tree in trees], np.int32)
        shape = len(trees), int(sizes.max(initial=0))
        tokens, parents, levels = (
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int16),
            np.zeros(shape, np.uint8),
        )
        for row, tree in enumerate(trees):
            nodes = slice(len(tree))
            tokens[row, nodes], parents[row, nodes], levels[row, nodes] = (
                tree.tokens,
                tree.parents,
                tree.levels,
            )
        return cls.plain(tokens, parents, levels, sizes)._replace(reason=reason)

    @classmethod
    def joined(cls, parts: Sequence["DraftBatch"]) -> "DraftBatch":
        """Return the drafts of parts of a batch, at least one, as those of the whole batch."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([part.sizes for part in parts])
        matches = np.concatenate([part.match_lengths for part in parts])
        counts = np.concatenate([part.match_counts for part in parts])
        shape, end = (len(sizes), max(part.tokens.shape[1] for part in parts)), 0
        trees = np.empty(shape, np.int32), np.empty(shape, np.int16), np.empty(shape, np.uint8)
        for part in parts:
            begin, end = end, end + len(part.sizes)
            for array, rows in zip(trees, part[:3], strict=True):
                array[begin:end, : part.tokens.shape[1]] = rows
        return cls(*trees, sizes, matches, counts, parts[0].reason)

    def inputs(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return tokens, parents, levels and sizes as kernels expect them."""
        return (
            as_input(self.tokens, np.int32),
            as_input(self.parents, np.int16),
            as_input(self.levels, np.uint8),
            as_input(self.sizes, np.int32),
        )

    def read_only(self) -> "DraftBatch":
        """Return the same drafts as arrays that kernels accept as they are."""
        tokens, parents, levels, sizes = self.inputs()
        return self._replace(tokens=tokens, parents=parents, levels=levels, sizes=sizes)

    def part(self, rows: Sequence[int]) -> "DraftBatch":
        """Return the drafts of some contexts, ascending."""
        if len(rows) == len(self.sizes):
            return self
        chosen = np.array(rows, np.int64)
        arrays: list[Any] = [array[chosen] for array in self[:6]]
        return DraftBatch._make([*arrays, self.reason])

    def trees(self) -> list[DraftTree]:
        """Return one tree for each context, as views of the arrays."""
        return [
            DraftTree(self.tokens[i, :size], self.parents[i, :size], self.levels[i, :size])
            for i, size in enumerate(self.sizes.tolist())
        ]

    def drafts(self) -> list[Draft]:
        """Return one draft for each context, as views of the arrays."""
        rows = zip(self.trees(), self.match_lengths.tolist(), self.match_counts.tolist(), strict=True)
        return [Draft(tree, length, count, self.reason) for tree, length, count in rows]

    def encode_trees(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return the size of each encoded tree, int32 [batch], and all trees concatenated, uint8 [bytes]."""
        lengths, data = codec.encode_trees(*self.inputs())
        return lengths, data


class LazyTrees(Sequence[DraftTree]):
    """The trees of a batch, each made when it is read."""

    def __init__(self, drafts: DraftBatch) -> None:
        self._drafts = drafts

    def __len__(self) -> int:
        return len(self._drafts.sizes)

    def __getitem__(self, place: Any) -> Any:
        """Return a tree."""
        drafts, nodes = self._drafts, (place, slice(int(self._drafts.sizes[place])))
        return DraftTree(drafts.tokens[nodes], drafts.parents[nodes], drafts.levels[nodes])


@cache
def _nothing(batch: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return tokens, parents, levels and sizes of empty drafts."""
    tokens, sizes = np.empty((batch, 0), np.int32), np.zeros(batch, np.int32)
    parents, levels = tokens.astype(np.int16), tokens.astype(np.uint8)
    return read_only(tokens), read_only(parents), read_only(levels), read_only(sizes)


@cache
def _no_matches(batch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    return read_only(np.zeros(batch, np.int32)), read_only(np.zeros(batch, np.int64))


def decode_drafts(
    data: bytes, start: int, batch: int, vocab_size: int, budget: int = MAX_NODES
) -> DraftBatch:
    """Decode drafts of at most `budget` nodes and check every guarantee of `DraftTree`; DraftTreeError if one fails.

    From `start` on, the data holds a table, u32 [3, batch]: bytes of each tree, match lengths, match counts; then the
    trees.
    """
    problem, wrong, *arrays = codec.decode_drafts(
        np.frombuffer(data, np.uint8), start, batch, vocab_size, budget
    )
    if problem:
        if wrong == batch:
            raise DraftTreeError(f"{len(data):,} bytes, more than the {wrong} trees take")
        lengths = np.frombuffer(data, "<u4", batch, start).tolist()
        begin = start + 12 * batch + sum(lengths[:wrong])
        tree = data[begin : begin + lengths[wrong]]
        raise DraftTreeError(f"tree {wrong + 1} of {batch}: {explain(problem, tree)}")
    return DraftBatch(*arrays)


def warm_up() -> None:
    """Compile the codec's kernels, or load them from numba's cache, before the first answer."""
    DraftBatch.empty(1).encode_trees()
    DraftTree.from_bytes(DraftTree.empty().to_bytes())


def rows_and_mask(
    batch: DraftBatch, lasts: Sequence[int], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return tokens, int64 [texts * rows], and mask, bool [texts * rows * rows], of the likeliest `rows - 1` nodes."""
    tokens = np.empty((len(lasts), rows), np.int64)
    mask = np.zeros((len(lasts), rows, rows), np.bool_)
    _fill_rows(tokens, mask, batch.tokens, batch.parents, batch.sizes, np.array(lasts, np.int64))
    return tokens.ravel(), mask.ravel()


@kernel
def _fill_rows(tokens, mask, nodes, parents, sizes, lasts):
    """Fill tokens and the mask, initially all False, from the trees of a batch."""
    for text in range(len(lasts)):
        tokens[text, 0] = lasts[text]
        mask[text, 0, 0] = True
        for row in range(1, tokens.shape[1]):
            if row <= sizes[text]:
                tokens[text, row] = nodes[text, row - 1]
                above = parents[text, row - 1] + 1
            else:
                tokens[text, row] = tokens[text, row - 1]
                above = row - 1
            for column in range(above + 1):
                mask[text, row, column] = mask[text, above, column]
            mask[text, row, row] = True


@kernel
def fill_pass(pasts, ids, depths, among, lasts, own_pasts, tokens, parents, sizes):
    """Fill the buffers of a pass over the trees of a batch, whose rows and texts may be padded.

    Args:
        pasts: int64 [texts], filled with `own_pasts`, int64 [batch]; padding is 0.
        ids: int64 [texts, rows], filled with `lasts`, int64 [batch], and the tokens of the trees.
        depths: int64 [texts, rows], filled with the depth of each row below the last token.
        among: bool [texts, rows, rows], filled with which rows attend to which; padding attends to itself.
        tokens: int32 [batch, width]; parents int16 likewise; sizes int32 [batch].
    """
    pasts[:], ids[:], depths[:], among[:] = 0, 0, 0, False
    for text in range(among.shape[0]):
        for row in range(among.shape[1]):
            among[text, row, row] = True
    for text in range(len(lasts)):
        pasts[text], ids[text, 0] = own_pasts[text], lasts[text]
        for node in range(sizes[text]):
            row, above = node + 1, np.int64(parents[text, node]) + 1
            ids[text, row], depths[text, row] = tokens[text, node], depths[text, above] + 1
            for column in range(above + 1):
                among[text, row, column] = among[text, above, column]
