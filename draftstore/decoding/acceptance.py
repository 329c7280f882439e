"""Acceptance: the part of a draft that the target model itself emits, and the token after it.

The walk starts at the root, the context's last token. At each visited node the model emits ONE token; if a child
carries it, the walk continues there, otherwise the token is the bonus token and the walk ends. So every emitted token
is what the model emits after the preceding ones, whatever was drafted: drafts change how many tokens a forward pass
yields, never which.

    tree          model says   at the root: cat,  at cat: ran,  at ran: off
    | cat - sat   visited      root, cat, ran
    |     \\- ran   emitted      cat, ran, off      path [cat, ran], bonus off
    | dog

One draw per node keeps sampling exact. A draw for each root-to-leaf path would try a token once for every path through
it: with two paths through a token of probability 0.5 it would be emitted 75 % of the time. Siblings carry different
tokens, so a draw matches at most one child. This is the sampling form of tree verification in SpecInfer
(https://arxiv.org/abs/2305.09781, section 4.3) for deterministic drafts. Whoever draws ahead of the walk, as
`draftstore.hf.sampling` does, undoes the draws below its end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.jit import as_input
from draftstore.trees.tree import DraftTree, child_of, find_fault

Choose = Callable[[int, Sequence[int]], int]
"""`choose(row, emitted)`: the token that the model emits at a row (0 = the root, i + 1 = node i) of the verified
tree, after the tokens emitted so far in this walk. It is called once for each visited node, in order."""


class Acceptance(NamedTuple):
    """The result of a forward pass over a tree.

    Attributes:
        path: accepted nodes, starting with the first token.
        tokens: int32 [len(path) + 1], the new tokens of the text: those of the path and the bonus token. If `ends`
            stopped the walk, its last token is the bonus token even if a node carries it.
    """

    path: list[int]
    tokens: NDArray[np.int32]


def accept(
    tree: DraftTree, choose: Choose, ends: Callable[[Sequence[int]], bool] = lambda _: False
) -> Acceptance:
    """Walk a tree along the model's tokens; DraftTreeError as from `check_tree`.

    `ends` tells whether the text ends with the last emitted token: EOS, a stop string, the length. It is called once
    for each emitted token, in order.
    """
    check_tree(tree)
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    path: list[int] = []
    emitted: list[int] = []
    node = -1
    while True:
        token = choose(node + 1, emitted)
        emitted.append(token)
        over = ends(emitted)
        node = child_of(parents, tokens, node, token)
        if node < 0 or over:
            return Acceptance(path, np.array(emitted, np.int32))
        path.append(node)


def check_tree(tree: DraftTree) -> None:
    """Raise a DraftTreeError for arrays of unequal lengths, a parent after its child, or equal siblings."""
    if not len(tree.tokens) == len(tree.parents) == len(tree.levels):
        raise DraftTreeError("a draft has tokens, parents and levels of unequal lengths")
    tokens = as_input(tree.tokens, np.int32)
    node = find_fault(as_input(tree.parents, np.int16), tokens)
    if node < 0:
        return
    parent = int(tree.parents[node])
    if not -1 <= parent < node:
        raise DraftTreeError(f"node {node} has parent {parent}, expected -1 or an earlier node")
    raise DraftTreeError(f"two children of node {parent} carry the token {tokens[node]}")
