"""Drafts of a batch of contexts as arrays, from kernels to the wire without an object per tree."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.jit import read_only
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
        """Return empty drafts of `batch` contexts."""
        none = np.zeros(batch, np.int32)
        return cls(
            np.empty((batch, 0), np.int32),
            np.empty((batch, 0), np.int16),
            np.empty((batch, 0), np.uint8),
            none,
            none,
            none.astype(np.int64),
            reason,
        )

    @classmethod
    def plain(cls, tokens: Any, parents: Any, levels: Any, sizes: Any) -> "DraftBatch":
        """Return drafts without matches in a store."""
        return cls(tokens, parents, levels, sizes, *_no_matches(len(sizes)))

    @classmethod
    def of(cls, rows: Sequence[Any]) -> "DraftBatch":
        """Return drafts that were made one by one: tokens, parents, levels, match length and match count of each."""
        sizes = np.array([len(row[0]) for row in rows], np.int32)
        shape = len(rows), int(sizes.max(initial=0))
        batch = cls(
            np.empty(shape, np.int32),
            np.empty(shape, np.int16),
            np.empty(shape, np.uint8),
            sizes,
            np.array([row[3] for row in rows], np.int32),
            np.array([row[4] for row in rows], np.int64),
        )
        for place, (tokens, parents, levels, *_) in enumerate(rows):
            size = len(tokens)
            batch.tokens[place, :size], batch.parents[place, :size] = tokens, parents
            batch.levels[place, :size] = levels
        return batch

    @classmethod
    def joined(cls, parts: Sequence["DraftBatch"]) -> "DraftBatch":
        """Return the drafts of parts of a batch, at least one, as those of the whole batch."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.tokens.shape[1] for part in parts)
        arrays: list[Any] = [
            np.concatenate(
                [
                    rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))
                    for rows in column
                ]
            )
            for column in zip(*(part[:3] for part in parts), strict=True)
        ]
        arrays += map(np.concatenate, zip(*(part[3:6] for part in parts), strict=True))
        return cls(*arrays)._replace(reason=parts[0].reason)

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
        lengths, data = codec.encode_trees(self.tokens, self.parents, self.levels, self.sizes)
        return lengths, data


@cache
def _no_matches(batch: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    return read_only(np.zeros(batch, np.int32)), read_only(np.zeros(batch, np.int64))


def decode_drafts(
    data: bytes, start: int, batch: int, vocab_size: int, budget: int = MAX_NODES
) -> DraftBatch:
    """Decode drafts and check every guarantee of `DraftTree`.

    Args:
        data: from `start` on a table, u32 [3, batch]: bytes of each tree, match lengths, match counts; then the trees.
        budget: maximum nodes of a tree.

    Raises:
        DraftTreeError: a tree is damaged or violates a guarantee.
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
