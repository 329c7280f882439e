"""Shapes of passes over several texts: how many texts, rows and columns a pass may have."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.hf.passes import Wants
from draftstore.trees.tree import DraftTree

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Possible numbers of rows of each text in a pass."""
TEXTS = (1, 2, 4, 8, 16, 32, 64)
"""Possible numbers of texts in a pass."""
MAX_ROWS = BUCKETS[-1]
MAX_TOGETHER = 512
"""Maximum rows of a pass over several texts: more of them cost as much as passes of their own."""
LEAST_WIDTH = 256
"""Minimum columns of attention; the number doubles as the text grows, up to the length of the pool."""


class Entry(NamedTuple):
    """What a pass reads of one text.

    Attributes:
        tokens: int64 [n + 1], token of every row.
        tree: tree of n nodes.
        past: tokens of the text in the pool.
        position: position of row 0.
    """

    tokens: NDArray[np.int64]
    tree: DraftTree
    past: int
    position: int


class PassShape(NamedTuple):
    """The shape of a pass: what a graph is captured for.

    Attributes:
        texts: number of texts.
        rows: rows of each.
        width: columns that they see.
        wants: outputs needed.
    """

    texts: int
    rows: int
    width: int
    wants: Wants


def padded(count: int, sizes: Sequence[int]) -> int:
    """Return the next of some ascending sizes; the count itself beyond the last."""
    return next((size for size in sizes if size >= count), count)


def most_rows(texts: int) -> int:
    """Return the maximum rows of each text in a pass."""
    most = min(MAX_ROWS, max(1, MAX_TOGETHER // texts))
    return max(size for size in BUCKETS if size <= most)
