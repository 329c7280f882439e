"""The static tree of Token Recycling, and kernels that fill it from the matrix and update its rows.

    matrix  int32 [vocab_size, 8], the candidates of each token, best first; -1 is an empty cell
    before  int32 [8], the candidates of the pass that emitted the text's last token; -1 if unknown

The ids in a row are distinct and valid: `_write_row` ensures this, so other kernels need not check.

The static tree says which candidates are drafted, and how likely each is. A node is a *rank path*, one digit per token:
0 is the likeliest successor of the text's last token, 02 the third likeliest successor of that one. The tokens are
looked up for each draft.

    row of the text's last token  a: b c       path   0   1   00  01  10
    rows of its candidates        b: d e       token  b   c   d   e   d
                                  c: d

The probability of a path is that of its parent times the rate of its last rank. Rates are constants: those counted in
the text accept as much (docs/team/findings.md).

In addition to the paths, there are up to eight *guesses*: likely candidates of the previous pass, which often come next
(LogitSpec, https://arxiv.org/abs/2507.01449). The tree below a guess is that below path 1.
"""

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.frontier import MAX_DEPTH, enter, grow, new_frontier, token_of, unpack_nodes
from draftstore.trees.tree import walk

WIDTH = 8
"""Candidates per token: ranks are 0 to 7."""

# Figure 3 and appendix A of "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
# Recycling" (https://arxiv.org/abs/2408.08696): 8, 21, 25, 15, 8 and 3 nodes, by length, then ascending.
PAPER_TREE = """
0 1 2 3 4 5 6 7
00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70
000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000 00001 00002 00010 00020 00100 01000 10000
000000 000001 000100
"""
PATHS = tuple(PAPER_TREE.split())
PARENTS: NDArray[np.int64] = np.array([PATHS.index(path[:-1]) if path[1:] else -1 for path in PATHS])
"""Index of each path's parent, -1 for the root."""
RANKS: NDArray[np.int64] = np.array([int(path[-1]) for path in PATHS])
STARTS: NDArray[np.int64] = np.searchsorted(PARENTS, np.arange(-1, len(PATHS) + 1))
"""Children of the root are the paths STARTS[0] to STARTS[1], those of path i STARTS[i + 1] to STARTS[i + 2]."""
BELOW_GUESS = PATHS.index("1")
"""The path whose subtree continues a guess."""

RATES: NDArray[np.float64] = np.array([0.39, 0.096, 0.05, 0.031, 0.021, 0.02, 0.012, 0.012])
"""How often the candidate of each rank was correct, measured with SmolLM2-135M in 97 answers."""
GUESS_RATES: NDArray[np.float64] = np.array([0.03, 0.028, 0.018, 0.013, 0.01, 0.009, 0.009, 0.009])
"""How often the guess of each rank was correct, in the same answers; the first counts only if the model samples."""


@kernel
def fill_trees(matrix, lasts, befores, texts, budget, max_level):
    """Fill the static tree for texts, int64 [batch]; `lasts` int64 [texts] are their last tokens, -1: no tree.

    Returns tokens int32 [batch, budget], parents int16, levels uint8 likewise, and sizes int32 [batch].
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
    """Write the rows of all tokens of a verified tree, and return `before` of the next draft, int32 [8].

    `last` is the text's last token before the pass, `accepted` int32 [k] are the new ones, `tokens` and `parents` [n]
    the tree. `candidates` int32 [n + 1, any] are for the root and each node, or none at all; ids outside the vocabulary
    are ignored, and so are rows without candidates.
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
