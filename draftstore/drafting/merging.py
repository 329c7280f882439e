"""Kernels for the drafts of texts in slots: those of several sources are merged, and compared with the actual text.

A source's probability of a node given its parent is p = P(node) / P(parent). The sources that propose the node are
treated as independent, so the node is wrong only if all of them are wrong:

    P(node | parent) = 1 - product of (1 - s p)          a noisy-or (Pearl, 1988, section 4.3)

where s <= 1 is the source's reliability in this text so far: correct tokens divided by expected ones, where it made
predictions. Both counts start at three, and decay by a tenth whenever the source predicts again. So a confident but
wrong source soon loses weight, and one that copies a passage gains weight for as long as that lasts. Predictions are
compared with the actual text, whether or not a node was verified.

Sums, maxima and cascades perform about as well with two good sources, but a bad third one misleads them
(docs/team/findings.md).
"""

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import SEPARATOR
from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.frontier import MAX_DEPTH, Frontier, new_frontier, unpack_nodes
from draftstore.trees.tree import LEVEL_PROBS, steps_below, walk
from draftstore.trees.trie import keep_best, new_trie, place_node

TRUST = 3.0
"""Initial counts of expected and correct tokens of every source."""
MEMORY = 0.9
"""Decay of the counts whenever a source predicts a token."""
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


@kernel
def find_wrong(tokens, parents, sizes):
    """Return the draft and node that make no tree, node -1 if it is the draft's size; (-1, -1) if all are trees."""
    for row in range(len(sizes)):
        if not 0 <= sizes[row] <= tokens.shape[1]:
            return row, -1
        for node in range(sizes[row]):
            if tokens[row, node] < 0 or not -1 <= parents[row, node] < node:
                return row, node
    return -1, -1


@kernel
def merge_texts(tokens, parents, levels, sizes, seen, mixed, slots, budgets, max_levels):
    """Merge the drafts of every text's sources; a text that is not mixed keeps the draft of its only source.

    Args:
        tokens: int32 [slots, sources, nodes], the drafts of every source; parents and levels likewise.
        sizes: int32 [slots, sources], nodes of each.
        seen: float64 [slots, sources, 2], expected and correct tokens of each source.
        mixed: int64 [slots], number of sources to merge; 0 for a text that is not mixed.
        slots: int64 [batch], the texts; budgets and max_levels likewise, maximum nodes and level of each; level -1: no
            draft.

    Returns:
        tokens int32 [batch, budget], parents int16 [batch, budget], levels uint8 [batch, budget], sizes int32 [batch].
    """
    batch, width, room = len(slots), max(1, budgets.max()), tokens.shape[1] * tokens.shape[2] + 1
    out_tokens, out_parents = np.empty((batch, width), np.int32), np.empty((batch, width), np.int16)
    out_levels, out_sizes = np.empty((batch, width), np.uint8), np.zeros(batch, np.int32)
    trie, nodes, kept = new_trie(room), new_frontier(width), np.empty(width + 1, np.int64)
    scratch = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
    for place in range(batch):
        slot, budget, level = slots[place], budgets[place], max_levels[place]
        if budget == 0 or level < 0:
            continue
        if mixed[slot] == 0:
            size = min(np.int64(sizes[slot, 0]), budget)
            out_tokens[place, :size] = tokens[slot, 0, :size]
            out_parents[place, :size] = parents[slot, 0, :size]
            out_levels[place, :size] = levels[slot, 0, :size]
        else:
            drafts = tokens[slot], parents[slot], levels[slot], sizes[slot]
            places = _find_chances(trie, scratch, drafts, seen[slot], mixed[slot])
            best = Frontier(nodes.keys[:budget], nodes.probs[:budget])
            size = keep_best(trie, best, kept, MAX_DEPTH, level)
            unpack_nodes(best, size, out_tokens[place], out_parents[place], out_levels[place])
            trie.child[:places] = 0
        out_sizes[place] = size
    return out_tokens, out_parents, out_levels, out_sizes


@leaf_kernel
def _find_chances(trie, scratch, drafts, seen, sources):
    """Fill a trie with the nodes of all drafts and their probabilities; return its number of nodes."""
    tokens, parents, levels, sizes = drafts
    places, above, doubts = scratch
    size = 1
    for source in range(sources):
        held = min(1.0, (seen[source, 1] + TRUST) / (seen[source, 0] + TRUST))
        for node in range(sizes[source]):
            parent = np.int64(parents[source, node])
            under = places[parent] if parent >= 0 else np.int64(0)
            place = place_node(trie, size, under, np.int64(tokens[source, node]))
            if place == size:
                above[place], doubts[place] = under, 1.0
                size += 1
            places[node] = place
            doubts[place] *= 1.0 - held * _PROBS[steps_below(levels[source], node, parent)]
    trie.probs[0] = 1.0
    for place in range(1, size):  # parents come before their children
        trie.probs[place] = trie.probs[above[place]] * (1.0 - doubts[place])
    return size


@kernel
def learn_texts(contexts, tokens, parents, levels, sizes, seen, matched, waiting, limits, slots, ids, stops):
    """Append new ids to the contexts, int32 [slots, any], and judge drafts that wait for it; see `merge_texts`.

    Args:
        matched: int32 [slots, sources], set to the number of new ids that each draft contained.
        waiting: bool [slots], whether the drafts have not been judged yet.
        limits: int64 [slots], limit of the ids of each text.
        ids: int32 [any], the new ids of all texts; `stops` int64 [batch], the end of each text's.

    Returns:
        -1, or the first text with an id outside [0, limit) other than `SEPARATOR`; then nothing has changed.
    """
    start = np.int64(0)
    for place in range(len(slots)):
        for i in range(start, stops[place]):
            if ids[i] >= limits[slots[place]] or (ids[i] < 0 and ids[i] != SEPARATOR):
                return place
        start = stops[place]
    start, width = np.int64(0), contexts.shape[1]
    for place in range(len(slots)):
        slot, new = slots[place], ids[start : stops[place]]
        start = stops[place]
        kept = max(0, width - len(new))
        for i in range(kept):
            contexts[slot, i] = contexts[slot, i + width - kept]
        for i in range(kept, width):
            contexts[slot, i] = new[len(new) - width + i]
        if len(new) > 0 and waiting[slot]:
            waiting[slot] = False
            for source in range(sizes.shape[1]):
                size = sizes[slot, source]
                above, own = parents[slot, source, :size], levels[slot, source, :size]
                state = above, own, seen[slot, source]
                matched[slot, source] = walk(tokens[slot, source, :size], above, new, _count_children, state)
    return -1


@leaf_kernel
def _count_children(state, node, child):
    """Count the expected and correct tokens among a node's children; see `draftstore.trees.tree.walk`."""
    parents, levels, seen = state
    expected = 0.0
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            expected += _PROBS[steps_below(levels, i, node)]
    if expected > 0.0:
        seen[0] = MEMORY * seen[0] + expected
        seen[1] = MEMORY * seen[1] + (1.0 if child >= 0 else 0.0)
