"""Kernels for the matrix of Token Recycling: fill a static tree from it, count correct paths, and update rows.

    matrix  int32 [vocab_size, 8], the candidates of each token, best first; -1 is an empty cell

The ids in a row are distinct and valid: `_write_row` ensures this, so other kernels need not check.
"""

from typing import Any

import numpy as np

from draftstore.drafting.rank_tree import GUESS_PRIOR, PRIOR_TRIES, WIDTH, path_probs
from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.frontier import MAX_DEPTH, enter, finish, grow, new_frontier, token_of
from draftstore.trees.walk import walk


@kernel
def fill_tree(
    matrix: Any,
    last: Any,
    before: Any,
    parents: Any,
    ranks: Any,
    starts: Any,
    tries: Any,
    hits: Any,
    guesses: Any,
    below_guess: Any,
    budget: Any,
    max_level: Any,
) -> Any:
    """Fill a static tree with tokens, and enter guesses beside it; an empty cell removes the subtree below it.

    Args:
        last: the text's last token.
        before: int32 [8], the candidates of the pass that emitted the last token, best first; -1 if unknown.
        parents: int64 [n], from the `RankTree`, as the next six.

    Returns:
        tokens int32 [k], parents int16 [k], levels uint8 [k].
    """
    probs = path_probs(parents, ranks, tries, hits)
    nodes = new_frontier(budget)
    slots = np.zeros(budget + 1, np.int64)  # rank paths of the root and the nodes; -1 is none
    rates = (guesses[1] + PRIOR_TRIES * GUESS_PRIOR) / (guesses[0] + PRIOR_TRIES)
    state = matrix, np.int64(last), before, ranks, starts, probs, slots, rates, np.int64(below_guess)
    return finish(nodes, grow(nodes, MAX_DEPTH, _enter_candidates, state, max_level))


@leaf_kernel
def _enter_candidates(
    state: Any, nodes: Any, slot: Any, parent: Any, depth: Any, prob: Any, tail: Any, max_level: Any
) -> Any:
    """Enter a token's candidates where the static tree has paths; see `draftstore.trees.frontier.grow`."""
    matrix, last, before, ranks, starts, probs, slots, rates, below_guess = state
    token, own = last, 1.0
    if slot > 0:
        token = token_of(nodes, slot - 1)
        above = token_of(nodes, parent - 1) if parent > 0 else last
        path, end = starts[slots[parent]], starts[slots[parent] + 1]
        while path < end and matrix[above, ranks[path]] != token:  # tokens of a row are distinct
            path += 1
        slots[slot] = 1 + (path if path < end else below_guess)
        if slots[slot] == 0:
            return tail
        own = probs[slots[slot] - 1]
    for path in range(starts[slots[slot]], starts[slots[slot] + 1]):
        candidate = np.int64(matrix[token, ranks[path]])
        if candidate >= 0:
            tail = enter(nodes, tail, candidate, prob * (probs[path] / own), depth + 1, slot, max_level)
    for rank in range(WIDTH if slot == 0 else 0):
        candidate = _guess(matrix, last, before, rank)
        if candidate >= 0:
            tail = enter(nodes, tail, candidate, rates[rank], 1, 0, max_level)
    return tail


@leaf_kernel
def _guess(matrix: Any, last: Any, before: Any, rank: Any) -> Any:
    """Return the guess of a rank; -1 if there is none, it is the last token, or one of its candidates."""
    guess = np.int64(before[rank])
    if guess >= len(matrix) or guess == last:
        return np.int64(-1)
    for other in range(WIDTH):
        if matrix[last, other] == guess:
            return np.int64(-1)
    return guess


@kernel
def count_paths(
    matrix: Any,
    last: Any,
    before: Any,
    accepted: Any,
    ranks: Any,
    starts: Any,
    tries: Any,
    hits: Any,
    guesses: Any,
    window: Any,
) -> None:
    """Count the correct rank paths of a `RankTree`, as far as the text followed them, and the correct guess.

    The last token is that before the pass. All counts are halved when one reaches twice as many tries as `window`.
    """
    slot, token, most = 0, np.int64(last), 0
    for rank in range(WIDTH if len(accepted) else 0):
        candidate = _guess(matrix, token, before, rank)
        if candidate >= 0:
            guesses[0, rank] += 1
            guesses[1, rank] += candidate == accepted[0]
            most = max(most, guesses[0, rank])
    for i in range(len(accepted)):
        found = 0
        for path in range(starts[slot], starts[slot + 1]):
            candidate = matrix[token, ranks[path]]
            if candidate >= 0:
                tries[path] += 1
                most = max(most, tries[path])
                if candidate == accepted[i]:
                    hits[path] += 1
                    found = path + 1
        if found == 0:
            break
        slot, token = found, np.int64(accepted[i])
    if most >= 2 * window:
        for path in range(len(tries)):
            tries[path] >>= 1
            hits[path] >>= 1
        guesses >>= 1


@kernel
def recycle(matrix: Any, last: Any, accepted: Any, tokens: Any, parents: Any, candidates: Any) -> None:
    """Write the rows of all tokens of a verified tree: first rejected nodes, in order, then accepted ones.

    Candidates, int32 [n + 1, any], are for the root and each node; ids outside the vocabulary are ignored, and so are
    rows without candidates.
    """
    is_accepted = np.zeros(len(tokens), np.bool_)
    walk(tokens, parents, accepted, _mark, is_accepted)
    for node in range(len(tokens)):
        if not is_accepted[node]:
            _write_row(matrix, np.int64(tokens[node]), candidates, node + 1)
    _write_row(matrix, np.int64(last), candidates, 0)
    for node in range(len(tokens)):
        if is_accepted[node]:
            _write_row(matrix, np.int64(tokens[node]), candidates, node + 1)


@leaf_kernel
def _mark(is_accepted: Any, _node: Any, child: Any) -> Any:
    """Mark an accepted node; see `draftstore.trees.walk.walk`."""
    if child >= 0:
        is_accepted[child] = True


@kernel
def write_rows(matrix: Any, tokens: Any, candidates: Any) -> None:
    """Write the rows of tokens, int32 [k], read-only, in order; `candidates` int32 [k, any], read-only."""
    for row in range(len(tokens)):
        _write_row(matrix, np.int64(tokens[row]), candidates, row)


@kernel
def fill_rows(matrix: Any, candidates: Any) -> None:
    """Write candidates of the first tokens, int32 [k, any], read-only, into empty rows of the matrix."""
    for token in range(len(candidates)):
        empty = True
        for rank in range(WIDTH):
            empty = empty and matrix[token, rank] < 0
        if empty:
            _write_row(matrix, np.int64(token), candidates, token)


@leaf_kernel
def _write_row(matrix: Any, token: Any, candidates: Any, row: Any) -> None:
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


@kernel
def best_successors(bigrams: Any, counts: Any, matrix: Any) -> None:
    """Write the most common successors of each token (bigrams [k, 2], ascending) into its empty row, ties by id."""
    best = np.zeros(WIDTH, np.int64)  # counts of the current row
    for i in range(len(bigrams)):
        token = np.int64(bigrams[i, 0])
        if i == 0 or token != bigrams[i - 1, 0]:
            best[:] = 0
        rank = WIDTH
        while rank > 0 and counts[i] > best[rank - 1]:
            rank -= 1
        for other in range(WIDTH - 1, rank, -1):
            best[other], matrix[token, other] = best[other - 1], matrix[token, other - 1]
        if rank < WIDTH:
            best[rank], matrix[token, rank] = counts[i], bigrams[i, 1]
