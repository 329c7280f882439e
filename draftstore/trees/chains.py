"""Chains: the single path of a draft tree to verify when trees cannot be verified."""

import numpy as np

from draftstore.trees.tree import DraftTree


def best_chain(tree: DraftTree, longest: int | None = None) -> DraftTree:
    """Return the path of at most `longest` nodes with the most expected accepted tokens, the sum of probabilities."""
    parents, probs = tree.parents.tolist(), tree.probs.tolist()
    ends = len(parents) if longest is None else longest
    sums, depths = [0.0] * (len(parents) + 1), [0] * (len(parents) + 1)  # the context is last, as parent -1
    best = -1
    for node, parent in enumerate(parents):
        sums[node], depths[node] = sums[parent] + probs[node], depths[parent] + 1
        if depths[node] <= ends and sums[node] > sums[best]:
            best = node
    path = tree.path(best)
    if len(path) == len(parents):
        return tree
    return DraftTree(tree.tokens[path], np.arange(-1, len(path) - 1, dtype=np.int16), tree.levels[path])
