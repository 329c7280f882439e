"""The trees of a mixture's sources as arrays for its kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.trees.tree import DraftTree


class WrongTreeError(DraftTreeError):
    """An invalid proposal; `place` is the position of its session."""

    def __init__(self, place: int, message: str) -> None:
        super().__init__(message)
        self.place = place


def join_trees(trees: Sequence[DraftTree]) -> tuple[NDArray[Any], ...]:
    """Return tokens int32, parents int16 and levels uint8 of all nodes, and the end of each tree, int64 [trees]."""
    try:
        return _join(trees)
    except Exception:
        for place, tree in enumerate(trees):
            try:
                _join([tree])
            except Exception as error:
                raise WrongTreeError(place, f"its proposal is not a tree: {error}") from error
        raise


def _join(trees: Sequence[DraftTree]) -> tuple[NDArray[Any], ...]:
    """Join trees; any exception means that one is invalid."""
    tokens = np.concatenate([tree.tokens for tree in trees], dtype=np.int32)
    parents = np.concatenate([tree.parents for tree in trees], dtype=np.int16)
    levels = np.concatenate([tree.levels for tree in trees], dtype=np.uint8)
    stops = np.cumsum([len(tree.tokens) for tree in trees], dtype=np.int64)
    if (
        not tokens.shape == parents.shape == levels.shape == (stops[-1],)
    ):  # otherwise kernels would read past their ends
        raise DraftTreeError(
            f"tokens {tokens.shape}, parents {parents.shape}, levels {levels.shape}: expected one of each per node"
        )
    return tokens, parents, levels, stops
