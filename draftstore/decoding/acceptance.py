"""Which part of a draft the target model says itself, and what it says next.

The walk starts at the root, the context's last token. At each node that it visits the model emits ONE token; if a
child carries it, the walk goes on there, otherwise the token is the bonus and the walk ends. So every emitted token
is what the model emits after the tokens before it, whatever was drafted: drafts change how many tokens one forward
pass yields, never which.

    tree          model says   at the root: cat,  at cat: ran,  at ran: off
    | cat - sat   visited      root, cat, ran
    |     \\- ran   emitted      cat, ran, off      path [cat, ran], bonus off
    | dog

One draw a node is what keeps sampling exact. A draw for each root-to-leaf path would try a token once for every path
through it: with two paths through a token of probability 0.5 it would come out 75 % of the time. Siblings carry
different tokens, so a draw matches at most one child. This is the sampling form of tree verification in SpecInfer
(https://arxiv.org/abs/2305.09781, section 4.3) for drafts that are given, not drawn.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftTreeError
from draftstore.trees.tree import DraftTree

Choose = Callable[[int, Sequence[int]], int]
"""`choose(row, emitted)`: the token that the model emits at a row (0 = the root, i + 1 = node i) of the tree that was
verified, after the tokens emitted so far in this walk. It is called once for each visited node, in order."""


class Acceptance(NamedTuple):
    """What a forward pass over a tree settled.

    Attributes:
        path: nodes that were accepted, from the first token on.
        tokens: int32 [len(path) + 1], what the text grows by: the tokens of the path, and the bonus token. A walk that
            was ended by `ends` has its last token as the bonus, though a node may carry it.
    """

    path: list[int]
    tokens: NDArray[np.int32]


def accept(
    tree: DraftTree, choose: Choose, ends: Callable[[Sequence[int]], bool] = lambda _: False
) -> Acceptance:
    """Walk a tree along what the model emits.

    Args:
        tree: the draft that was verified.
        choose: the model's token at a row.
        ends: whether the text ends with the last of the tokens emitted so far: EOS, a stop string, the length. It is
            called once for each emitted token, in order.

    Raises:
        DraftTreeError: two children of a node carry the same token, or a parent is no earlier node. Such a tree
            would not change the output either, but it breaks the drafter's contract.
    """
    children = _children(tree)
    path: list[int] = []
    emitted: list[int] = []
    row = 0
    while True:
        token = choose(row, emitted)
        emitted.append(token)
        over = ends(emitted)
        node = children.get((row - 1, token))
        if node is None or over:
            return Acceptance(path, np.array(emitted, np.int32))
        path.append(node)
        row = node + 1


def accept_greedy(tree: DraftTree, choices: NDArray[np.integer]) -> Acceptance:
    """Walk a tree along the model's most likely tokens.

    Args:
        tree: the draft that was verified.
        choices: [n + 1], the most likely token at the root and at each node.
    """
    return accept(tree, lambda row, _emitted: int(choices[row]))


def accept_sampled(
    tree: DraftTree, probs: NDArray[np.floating], generator: np.random.Generator
) -> Acceptance:
    """Walk a tree along tokens that are drawn from the model's distributions, one draw a visited node.

    Args:
        tree: the draft that was verified.
        probs: [n + 1, vocabulary], the distribution at the root and at each node, each of sum 1.
        generator: of the draws.
    """

    def draw(row: int, _emitted: Sequence[int]) -> int:
        sums = probs[row].cumsum(dtype=np.float64)
        return int(sums.searchsorted(generator.random() * sums[-1], side="right"))

    return accept(tree, draw)


def _children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """Return each node by its parent and its token.

    Raises:
        DraftTreeError: see `accept`.
    """
    children: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        if not -1 <= edge[0] < node:
            raise DraftTreeError(f"node {node} has parent {edge[0]}, expected -1 or an earlier node")
        if children.setdefault(edge, node) != node:
            raise DraftTreeError(f"two children of node {edge[0]} carry the token {edge[1]}")
    return children
