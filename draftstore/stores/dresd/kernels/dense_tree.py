"""Draft trees from the nearest entries of a dense store: what followed them, as one trie.

Each of the neighbours of a query brings the tokens that followed it in the corpus, never those of another document.
Continuations that begin alike share nodes. A neighbour at a distance of d = 1 - cosine weighs w = 1 / (1 + d / reach).
With W the sum over the neighbours that go through a node, and U = unseen * settled ** depth, its child has the chance

                           W(child)              W(child)
    P(child | node) =  ----------------- x ----------------------
                       W(child) + doubt     W(all children) + U

The right half shares the node's chance out among the neighbours and what the store does not know, which matters less
the longer a path has held. The left half doubts what few or far neighbours say alone: many that agree are right more
often than their share. So a miss gets most where all differ, as in the Witten-Bell estimate of
`draftstore.search.expand`, whose counts are the weights here.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError
from draftstore.jit import kernel, leaf_kernel
from draftstore.stores.dresd.kernels.nearest import find_nearest
from draftstore.trees.blend import Trie, keep_best, new_trie, place_nodes
from draftstore.trees.frontier import new_frontier, unpack_nodes


class Calibration(NamedTuple):
    """How the chance of a node follows from its neighbours.

    Attributes:
        reach: distance at which a neighbour weighs half of what it does at none.
        doubt: weight of the neighbours of a child at which they are taken for half of what they say.
        unseen: weight of what the store does not know, behind the context.
        settled: what is left of that behind each token of a path.
    """

    reach: float
    doubt: float
    unseen: float
    settled: float

    def check(self) -> None:
        """Refuse values that make no chances.

        Raises:
            DraftstoreError: the first of them, with what is expected.
        """
        for name, value in self._asdict().items():
            if not 0.0 < value < math.inf or (name == "settled" and value > 1.0):
                raise DraftstoreError(f"a calibration with {name} = {value}: expected a number above 0")


# Maximum likelihood of what a model said next, with 3, 10 and 64 neighbours alike: SmolLM2-135M-Instruct with stores of
# 325,000 and 398,000 entries, of another model's answers and of its own. In its answers to prompts that were not
# fitted, drafts from 64 neighbours foretell 0.61 and 1.00 accepted tokens a pass, where 0.60 and 0.87 are; those from
# 10 foretell 0.53 and 0.84, where 0.47 and 0.73 are.
CALIBRATION = Calibration(reach=0.047, doubt=0.217, unseen=0.091, settled=0.685)


class Scratch(NamedTuple):
    """Room for the trie of one query, used again for the next.

    Attributes:
        trie: its places; place 0 is the context.
        weights: float64 [places], of the neighbours that go through a place.
        sums: float64 [places], of those that go on there.
        above: int64 [places], place of the parent.
        unseen: float64 [places], weight of what the store does not know there.
        path: int32 [length], tokens of one continuation.
        chain: int64 [length], its parents: each token follows the one before it.
        places: int64 [length], where it lies in the trie.
        kept: int64 [budget + 1], for `keep_best`.
    """

    trie: Trie
    weights: NDArray[np.float64]
    sums: NDArray[np.float64]
    above: NDArray[np.int64]
    unseen: NDArray[np.float64]
    path: NDArray[np.int32]
    chain: NDArray[np.int64]
    places: NDArray[np.int64]
    kept: NDArray[np.int64]


@kernel
def draft_trees(
    index: Any,
    tokens: Any,
    calibration: Any,
    contexts: Any,
    queries: Any,
    drafts: Any,
    length: Any,
    probing: Any,
    budget: Any,
    max_level: Any,
) -> Any:
    """Draw one draft tree for each query.

    Args:
        index: DenseIndex.
        tokens: unsigned [tokens], the corpus: documents, each closed by an id outside the vocabulary.
        calibration: Calibration.
        contexts: int32 [batch, at least 1], of each the last token was just sampled.
        queries: float32 [batch, dims], of any length; nothing is drafted for one with NaN.
        drafts: most neighbours of a query.
        length: most tokens of a continuation.
        probing: how much of a large group is visited, see `draftstore.stores.dresd.kernels.nearest`.
        budget: most nodes of a tree.
        max_level: highest level that a node may have.

    Returns:
        tokens int32 [batch, budget], parents int16 [batch, budget], levels uint8 [batch, budget], sizes int32 [batch],
        entries of the group of each int64 [batch], 0 where there was nothing to compare.
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
def new_scratch(drafts: Any, length: Any, budget: Any) -> Any:
    """Return room for tries of `drafts` continuations."""
    places = drafts * length + 1
    return Scratch(
        new_trie(places),
        np.empty(places, np.float64),
        np.empty(places, np.float64),
        np.empty(places, np.int64),
        np.empty(places, np.float64),
        np.empty(length, np.int32),
        np.arange(-1, length - 1),
        np.empty(length, np.int64),
        np.empty(budget + 1, np.int64),
    )


@kernel
def draw_tree(
    tokens: Any, vocab_size: Any, calibration: Any, starts: Any, similarities: Any, length: Any, scratch: Any,
    nodes: Any, max_level: Any,
) -> Any:  # fmt: skip
    """Draw the tree of some neighbours; return its number of nodes.

    Args:
        tokens: see `draft_trees`.
        vocab_size: ids lie below it.
        calibration: see `draft_trees`.
        starts: int64 [neighbours], where the continuation of each stands in the corpus; nearest first.
        similarities: float32 [neighbours], their cosines.
        length: see `draft_trees`.
        scratch: room for as many neighbours.
        nodes: a Frontier, is filled.
        max_level: see `draft_trees`.
    """
    size = _clear(scratch)
    for i in range(len(starts)):
        count = _read(tokens, starts[i], vocab_size, scratch.path, length)
        size = _hang(scratch, size, count, _weight(calibration, similarities[i]))
    _find_chances(scratch, size, calibration)
    return keep_best(scratch.trie, nodes, scratch.kept, length, max_level)


@leaf_kernel
def _clear(scratch: Any) -> Any:
    """Leave the context alone in a trie; return its size."""
    for place in range(len(scratch.sums)):
        scratch.trie.child[place] = 0
        scratch.weights[place] = 0.0
        scratch.sums[place] = 0.0
    return 1


@leaf_kernel
def _weight(calibration: Any, similarity: Any) -> Any:
    """Return the weight of a neighbour; next to nothing if it has no similarity, as in a damaged store."""
    distance = max(0.0, 1.0 - similarity) if similarity > -1.0 else 2.0
    return 1.0 / (1.0 + distance / calibration.reach)


@leaf_kernel
def _read(tokens: Any, start: Any, vocab_size: Any, path: Any, length: Any) -> Any:
    """Read a continuation as far as its document goes, from wherever a store says; return its tokens."""
    count = 0
    while count < length and 0 <= start + count < len(tokens) and tokens[start + count] < vocab_size:
        path[count] = tokens[start + count]
        count += 1
    return count


@leaf_kernel
def _hang(scratch: Any, size: Any, count: Any, weight: Any) -> Any:
    """Add the first `count` tokens of the path to a trie of `size` places; return its new size."""
    size = place_nodes(scratch.trie, size, scratch.path, scratch.chain, 0, count, scratch.places)
    above = np.int64(0)
    for i in range(count):
        place = scratch.places[i]
        scratch.above[place] = above
        scratch.weights[place] += weight
        scratch.sums[above] += weight
        above = place
    return size


@leaf_kernel
def _find_chances(scratch: Any, size: Any, calibration: Any) -> Any:
    """Fill a trie with the chances of its places."""
    probs, unseen = scratch.trie.probs, scratch.unseen
    probs[0], unseen[0] = 1.0, calibration.unseen
    for place in range(1, size):  # parents stand before their children
        above, weight = scratch.above[place], scratch.weights[place]
        held = weight / (weight + calibration.doubt)
        probs[place] = probs[above] * held * weight / (scratch.sums[above] + unseen[above])
        unseen[place] = calibration.settled * unseen[above]
