"""Draft trees from the nearest entries of a dense store: their continuations, merged into a trie.

Each neighbour of a query contributes the tokens that followed it in the corpus, up to the end of its document.
Continuations share nodes along common prefixes. A neighbour at distance d = 1 - cosine has the weight
w = 1 / (1 + d / reach). With W the summed weight of the neighbours through a node, and U = unseen * settled ** depth,
the probability of a child is

                           W(child)              W(child)
    P(child | node) =  ----------------- x ----------------------
                       W(child) + doubt     W(all children) + U

The right factor splits the node's probability between the neighbours and unseen continuations, whose share shrinks
along a path. The left factor discounts children with few or distant neighbours: when many agree, they are right more
often than their share. So a miss gets most when all neighbours differ, as in the Witten-Bell estimate of
`draftstore.search.expand`, with weights instead of counts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.stores.dresd.kernels.nearest import find_nearest
from draftstore.trees.frontier import new_frontier, unpack_nodes
from draftstore.trees.trie import Trie, keep_best, new_trie, place_node


class Calibration(NamedTuple):
    """Parameters of the probability of a node given its neighbours.

    Attributes:
        reach: distance at which a neighbour has half the weight of one at distance zero.
        doubt: weight of a child's neighbours at which its probability is halved.
        unseen: weight of unseen continuations right after the context.
        settled: factor on that weight for each token of a path.
    """

    reach: float
    doubt: float
    unseen: float
    settled: float


# Maximum likelihood of the model's next tokens, with 3, 10 and 64 neighbours weighted equally: SmolLM2-135M-Instruct,
# stores of 325,000 and 398,000 entries, from another model's answers and from its own. On held-out prompts, drafts from
# 64 neighbours predict 0.61 and 1.00 accepted tokens per pass, against 0.60 and 0.87 observed; from 10 neighbours 0.53
# and 0.84, against 0.47 and 0.73.
CALIBRATION = Calibration(reach=0.047, doubt=0.217, unseen=0.091, settled=0.685)


class Scratch(NamedTuple):
    """Buffers for the trie of a query, reused for the next one.

    Attributes:
        trie: its nodes; node 0 is the context.
        weights: float64 [places], weight of the neighbours through a node.
        sums: float64 [places], weight of those that continue beyond it.
        above: int64 [places], parent node.
        unseen: float64 [places], weight of unseen continuations there.
        kept: int64 [budget + 1], for `keep_best`.
    """

    trie: Trie
    weights: NDArray[np.float64]
    sums: NDArray[np.float64]
    above: NDArray[np.int64]
    unseen: NDArray[np.float64]
    kept: NDArray[np.int64]


@kernel
def draft_trees(index, tokens, calibration, contexts, queries, drafts, length, probing, budget, max_level):
    """Draw a draft tree for each query, float32 [batch, dims], of any length; one with NaN gets none.

    The last tokens of `contexts`, int32 [batch, at least 1], were just sampled. `tokens` is the corpus: documents, each
    ended by an id outside the vocabulary. `drafts` and `length` limit neighbours and tokens of a continuation;
    `probing` is that of `find_nearest`.

    Returns tokens int32 [batch, budget], parents int16, levels uint8 likewise, sizes int32 [batch], and the entries in
    the searched group, int64 [batch], 0 if nothing was searched.
    """
    batch = len(contexts)
    ids, parents = np.empty((batch, budget), np.int32), np.empty((batch, budget), np.int16)
    levels = np.empty((batch, budget), np.uint8)
    sizes, counts = np.zeros(batch, np.int32), np.zeros(batch, np.int64)
    entries, similarities = np.empty(drafts, np.int64), np.empty(drafts, np.float32)
    starts = np.empty(drafts, np.int64)
    nodes, scratch = new_frontier(budget), new_scratch(drafts, length, budget)
    for row in range(batch):
        found, group = find_nearest(index, queries[row], contexts[row, -1], probing, entries, similarities)
        if found == 0:
            continue
        for i in range(found):
            starts[i] = index.positions[entries[i]]
        size = draw_tree(
            tokens, len(index.groups) - 1, calibration, starts[:found], similarities, length, scratch, nodes,
            max_level,
        )  # fmt: skip
        unpack_nodes(nodes, size, ids[row], parents[row], levels[row])
        sizes[row], counts[row] = size, group
    return ids, parents, levels, sizes, counts


@kernel
def new_scratch(drafts, length, budget):
    """Return buffers for tries of `drafts` continuations."""
    places = drafts * length + 1
    return Scratch(
        new_trie(places),
        np.empty(places, np.float64),
        np.empty(places, np.float64),
        np.empty(places, np.int64),
        np.empty(places, np.float64),
        np.empty(budget + 1, np.int64),
    )


@kernel
def draw_tree(tokens, vocab_size, calibration, starts, similarities, length, scratch, nodes, max_level):
    """Draw the tree of given neighbours, nearest first; return its number of nodes. See `draft_trees`.

    `starts` are int64 [neighbours], their continuations in the corpus, `similarities` float32 [neighbours], their
    cosines; `scratch` has room for as many neighbours, and `nodes` is a Frontier to fill.
    """
    size = _clear(scratch)
    for i in range(len(starts)):
        size = _add(
            scratch, size, tokens, starts[i], length, vocab_size, _weight(calibration, similarities[i])
        )
    _find_chances(scratch, size, calibration)
    return keep_best(scratch.trie, nodes, scratch.kept, length, max_level)


@leaf_kernel
def _clear(scratch):
    """Reset a trie to the context; return its size."""
    for place in range(len(scratch.sums)):
        scratch.trie.child[place] = 0
        scratch.weights[place] = 0.0
        scratch.sums[place] = 0.0
    return 1


@leaf_kernel
def _weight(calibration, similarity):
    """Return the weight of a neighbour; close to zero for an invalid similarity, as in a damaged store."""
    distance = max(0.0, 1.0 - similarity) if similarity > -1.0 else 2.0
    return 1.0 / (1.0 + distance / calibration.reach)


@leaf_kernel
def _add(scratch, size, tokens, start, length, vocab_size, weight):
    """Add a continuation, up to the end of its document, to a trie of `size` nodes; return its new size."""
    above = np.int64(0)
    for position in range(start, start + length):
        if position < 0 or position >= len(tokens) or tokens[position] >= vocab_size:
            break
        place = place_node(scratch.trie, size, above, np.int64(tokens[position]))
        size = max(size, place + 1)
        scratch.above[place] = above
        scratch.weights[place] += weight
        scratch.sums[above] += weight
        above = place
    return size


@leaf_kernel
def _find_chances(scratch, size, calibration):
    probs, unseen = scratch.trie.probs, scratch.unseen
    probs[0], unseen[0] = 1.0, calibration.unseen
    for place in range(1, size):  # parents come before children
        above, weight = scratch.above[place], scratch.weights[place]
        agreed = weight / (weight + calibration.doubt)
        probs[place] = probs[above] * agreed * weight / (scratch.sums[above] + unseen[above])
        unseen[place] = calibration.settled * unseen[above]
