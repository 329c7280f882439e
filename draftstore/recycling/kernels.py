"""Kernels for the matrix of Token Recycling: fill a static tree from it, and update rows.

    matrix  int32 [vocab_size, 8], the candidates of each token, best first; -1 is an empty cell
    before  int32 [8], the candidates of the pass that emitted the text's last token; -1 if unknown

The ids in a row are distinct and valid: `_write_row` ensures this, so other kernels need not check.
"""

import numpy as np

from draftstore.jit import kernel, leaf_kernel
from draftstore.recycling.paths import BELOW_GUESS, GUESS_RATES, RANKS, RATES, STARTS, WIDTH
from draftstore.trees.frontier import MAX_DEPTH, enter, grow, new_frontier, token_of, unpack_nodes
from draftstore.trees.walk import walk


@kernel
def fill_trees(matrix, lasts, befores, texts, budget, max_level):
    """Fill the static tree for texts, int64 [batch]; `lasts` int64 [texts] are their last tokens, -1: no tree.

    Returns:
        tokens int32 [batch, budget], parents int16 [batch, budget], levels uint8 [batch, budget], sizes int32 [batch].
    """
    batch = len(texts)
    tokens, parents = np.empty((batch, budget), np.int32), np.empty((batch, budget), np.int16)
    levels, sizes = np.empty((batch, budget), np.uint8), np.zeros(batch, np.int32)
    nodes, slots = new_frontier(budget), np.zeros(budget + 1, np.int64)
    for row in range(batch):
        last = lasts[texts[row]]
        if last >= 0:
            state = matrix, last, befores[texts[row]], slots  # rank paths of the root and the nodes
            sizes[row] = grow(nodes, MAX_DEPTH, _enter_candidates, state, max_level)
            unpack_nodes(nodes, sizes[row], tokens[row], parents[row], levels[row])
    return tokens, parents, levels, sizes


@leaf_kernel
def _enter_candidates(state, nodes, slot, parent, depth, prob, tail, max_level):
    """Enter a token's candidates where the static tree has paths; see `draftstore.trees.frontier.grow`."""
    matrix, last, before, slots = state
    token = last
    if slot > 0:
        token = token_of(nodes, slot - 1)
        above = token_of(nodes, parent - 1) if parent > 0 else last
        path, end = STARTS[slots[parent]], STARTS[slots[parent] + 1]
        while path < end and matrix[above, RANKS[path]] != token:  # tokens of a row are distinct
            path += 1
        slots[slot] = 1 + (path if path < end else BELOW_GUESS)
    for path in range(STARTS[slots[slot]], STARTS[slots[slot] + 1]):
        candidate = np.int64(matrix[token, RANKS[path]])
        if candidate >= 0:
            tail = enter(nodes, tail, candidate, prob * RATES[RANKS[path]], depth + 1, slot, max_level)
    for rank in range(WIDTH if slot == 0 else 0):
        candidate = _guess(matrix, last, before, rank)
        if candidate >= 0:
            tail = enter(nodes, tail, candidate, GUESS_RATES[rank], 1, 0, max_level)
    return tail


@leaf_kernel
def _guess(matrix, last, before, rank):
    """Return the guess of a rank; -1 if there is none, or if it is the last token or one of its candidates."""
    guess = np.int64(before[rank])
    if guess >= len(matrix) or guess == last:
        return np.int64(-1)
    for other in range(WIDTH):
        if matrix[last, other] == guess:
            return np.int64(-1)
    return guess


@kernel
def learn(matrix, last, accepted, tokens, parents, candidates):
    """Write the rows of all tokens of a verified tree.

    Args:
        last: the text's last token before the pass.
        accepted: int32 [k], the new tokens.
        tokens: int32 [n], of the tree; likewise `parents`.
        candidates: int32 [n + 1, any], for the root and each node, or none at all; ids outside the vocabulary are
            ignored, and so are rows without candidates.

    Returns:
        int32 [8], `before` of the next draft.
    """
    if len(candidates):
        is_accepted = np.zeros(len(tokens), np.bool_)
        walk(tokens, parents, accepted, _mark, is_accepted)
        for wins in (False, True):
            for node in range(len(tokens)):
                if is_accepted[node] == wins:
                    _write_row(matrix, np.int64(tokens[node]), candidates, node + 1)
            if not wins:
                _write_row(matrix, np.int64(last), candidates, 0)
    if len(accepted) > len(candidates):
        return np.full(WIDTH, -1, np.int32)
    # Of all rows of its token, that of the last accepted node was written last.
    return matrix[np.int64(accepted[-2]) if len(accepted) > 1 else np.int64(last)].copy()


@leaf_kernel
def _mark(is_accepted, _node, child):
    if child >= 0:
        is_accepted[child] = True


@kernel
def write_rows(matrix, tokens, candidates):
    """Write the rows of tokens, int32 [k], in order; `candidates` int32 [k, any]. Returns the last row, int32 [8]."""
    for row in range(len(tokens)):
        _write_row(matrix, np.int64(tokens[row]), candidates, row)
    return matrix[tokens[-1]].copy()


@leaf_kernel
def _write_row(matrix, token, candidates, row):
    """Write one row of distinct candidates; a row without candidates leaves the matrix unchanged."""
    vocab_size, width = len(matrix), min(WIDTH, candidates.shape[1])
    if token < 0 or token >= vocab_size:
        return
    known = False
    for rank in range(width):
        known = known or 0 <= candidates[row, rank] < vocab_size
    for rank in range(WIDTH if known else 0):
        candidate = np.int64(candidates[row, rank]) if rank < width else np.int64(-1)
        if candidate < 0 or candidate >= vocab_size:
            candidate = np.int64(-1)
        for other in range(rank):
            if matrix[token, other] == candidate:
                candidate = np.int64(-1)
        matrix[token, rank] = candidate
