"""Models that say the most likely token at each row of a tree, or draw one: what `accept` is tested with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.acceptance import Acceptance, accept
from draftstore.trees.tree import DraftTree


def accept_greedy(tree: DraftTree, choices: NDArray[np.integer]) -> Acceptance:
    """Walk a tree along the most likely tokens: `choices` [n + 1], at the root and at each node."""
    return accept(tree, lambda row, _emitted: int(choices[row]))


def accept_sampled(
    tree: DraftTree, probs: NDArray[np.floating], generator: np.random.Generator
) -> Acceptance:
    """Walk a tree along tokens drawn from distributions, one draw a visited node.

    Args:
        tree: the draft that was verified.
        probs: [n + 1, vocabulary], the distribution at the root and at each node, each of sum 1.
        generator: of the draws.
    """

    def draw(row: int, _emitted: Sequence[int]) -> int:
        sums = probs[row].cumsum(dtype=np.float64)
        return int(sums.searchsorted(generator.random() * sums[-1], side="right"))

    return accept(tree, draw)
