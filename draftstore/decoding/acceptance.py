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
from draftstore.jit import as_input, kernel
from draftstore.trees.batch import DraftBatch
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


class Walks(NamedTuple):
    """What the model emits along the trees of a batch, as if no text ended.

    Attributes:
        tokens: int32 [batch, width + 1], the emitted tokens.
        nodes: int32 [batch, width + 1], the nodes that carry them; -1 for the last one, which leaves the tree. A walk
            that ends at a node ends at an error, which choosing the next token raises.
        sizes: int64 [batch], number of emitted tokens; 0: unknown, the text chooses them row by row.
    """

    tokens: NDArray[np.int32]
    nodes: NDArray[np.int32]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> "Walks":
        """Return walks given as the emitted tokens and the accepted nodes of each text."""
        sizes = np.array([*map(len, tokens)], np.int64)
        emitted, nodes = (np.full((len(sizes), sizes.max(initial=0)), -1, np.int32) for _ in range(2))
        for text, (own, path) in enumerate(zip(tokens, paths, strict=True)):
            emitted[text, : len(own)], nodes[text, : len(path)] = own, path
        return cls(emitted, nodes, sizes)

    @classmethod
    def unknown(cls, batch: int) -> "Walks":
        """Return the walks of texts that all choose row by row."""
        none = np.empty((batch, 0), np.int32)
        return cls(none, none, np.zeros(batch, np.int64))


def walk_greedily(drafts: DraftBatch, best: NDArray[np.int64]) -> Walks:
    """Return what a model emits that always emits its most likely token: `best`, int64 [batch, rows], at each row."""
    tokens, parents, _, sizes = drafts.inputs()
    return Walks(*_walk_greedily(tokens, parents, sizes, as_input(best, np.int64)))


@kernel
def _walk_greedily(tokens, parents, sizes, best):
    texts, most = len(sizes), 1 + sizes.max()
    emitted, nodes = np.empty((texts, most), np.int32), np.empty((texts, most), np.int32)
    counts = np.zeros(texts, np.int64)
    for text in range(texts):
        node, count = np.int64(-1), np.int64(0)
        while True:
            token, child = best[text, node + 1], np.int64(-1)
            for i in range(node + 1, sizes[text]):
                if parents[text, i] == node and tokens[text, i] == token:
                    child = np.int64(i)
                    break
            emitted[text, count], nodes[text, count] = token, child
            count, node = count + 1, child
            if child < 0:
                break
        counts[text] = count
    return emitted, nodes, counts


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
