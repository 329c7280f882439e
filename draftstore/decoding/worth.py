"""Which prefix of a draft is worth its time, and how well the drafter's probabilities held: kernels of the planner.

All of this is about the chance that a node follows its parent, its own probability divided by its parent's: it is what
the drafter says of one more token, and what can be checked whenever the text comes by the parent.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.tree import LEVEL_PROBS

BANDS = 16
"""Bands of probability, half an octave each; the last takes all that is lower."""
TRUST = 4.0
"""Accepted nodes that the drafter's own probabilities count for, as a whole and in each band."""
PROMISES = 6
"""Bands of accepted tokens in a pass: the first, the second, the next two, four and eight, and all others."""
_LEVELS_PER_BAND = 8
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


def corrections(seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much to multiply the drafter's probabilities: the posterior mean of a Gamma prior.

    Acceptances are taken as Poisson events, of which `factor` times as many occur as the drafter expects. The factor of
    all children of the context, and of all deeper nodes, is drawn to 1; that of a band of probability, to the former.

    Args:
        seen: float64 [2, bands, 2], expected and real acceptances of children of the context, and of deeper nodes.

    Returns:
        float64 [2, bands].
    """
    whole = seen.sum(axis=1)
    general = (whole[:, 1:] + TRUST) / (whole[:, :1] + TRUST)
    factors: NDArray[np.float64] = (seen[:, :, 1] + TRUST * general) / (seen[:, :, 0] + TRUST)
    return factors


def held(promised: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much of what whole drafts promise comes true, with the same prior.

    Of a draft that promises many tokens fewer come than of its nodes taken one by one: what misleads a drafter
    misleads it in all of a tree.

    Args:
        promised: float64 [PROMISES, 2], accepted tokens of passes, expected and real, by how many came before them.

    Returns:
        float64 [PROMISES].
    """
    shares: NDArray[np.float64] = (promised[:, 1] + TRUST) / (promised[:, 0] + TRUST)
    return shares


@kernel
def best_prefix(
    parents: Any, levels: Any, factors: Any, shares: Any, costs: Any, rate: Any, account: Any, promise: Any
) -> Any:
    """Return how many nodes of a draft are worth verifying, the fewest of equally good numbers.

    A node's chance is its parent's, times the corrected chance that it follows its parent.

    Args:
        parents: int16 [n], read-only.
        levels: uint8 [n], read-only.
        factors: float64 [2, bands], see `corrections`.
        shares: float64 [PROMISES], see `held`.
        costs: float64 [at least n + 1], seconds of passes over 1 row, 2 rows, ...
        rate: tokens per second.
        account: seconds that the pass may take longer than one over 1 row.
        promise: float64 [PROMISES], is overwritten: the tokens that the prefix promises, before `shares`.

    Returns:
        The size of the prefix; -i - 1 if the parent of node i is no earlier node.
    """
    chances = np.empty(len(parents))
    best, most, total, tokens = 0, 0.0, 0.0, 0.0
    for i in range(len(parents)):
        parent = np.int64(parents[i])
        if parent < -1 or parent >= i:
            return -i - 1
        deeper = 1 if parent >= 0 else 0
        steps = _steps_to(levels, i, parent)
        follows = min(1.0, _PROBS[steps] * factors[deeper, _band_of(steps)])
        chances[i] = follows * chances[parent] if deeper else follows
        band, here = _split(total, chances[i])
        tokens += here * shares[band] + (chances[i] - here) * shares[min(band + 1, PROMISES - 1)]
        total += chances[i]
        extra = costs[i + 1] - costs[0]
        if extra <= account and tokens - rate * extra > most:
            best, most = i + 1, tokens - rate * extra
    promise[:] = 0.0
    total = 0.0
    for i in range(best):
        band, here = _split(total, chances[i])
        promise[band] += here
        promise[min(band + 1, PROMISES - 1)] += chances[i] - here
        total += chances[i]
    return best


@leaf_kernel
def _split(total: Any, chance: Any) -> Any:
    """Return the band behind `total` expected tokens, and how much of a chance lies in it; the next has the rest."""
    band, end = 0, 1.0
    while total >= end and band < PROMISES - 1:
        band += 1
        end *= 2.0
    return band, chance if band == PROMISES - 1 else min(chance, end - total)


@kernel
def came_true(promise: Any, accepted: Any, promised: Any) -> Any:
    """Count what a pass promised and what came of it, in the bands that it promised anything of.

    Args:
        promise: float64 [PROMISES], see `best_prefix`.
        accepted: tokens of the draft that were accepted.
        promised: float64 [PROMISES, 2], is added to; see `held`.
    """
    for band in range(PROMISES):
        if promise[band] > 0.0:
            begin = 0 if band == 0 else 1 << (band - 1)
            end = 1 << band if band < PROMISES - 1 else accepted
            promised[band, 0] += promise[band]
            promised[band, 1] += max(0, min(accepted, end) - begin)


@kernel
def judge(tokens: Any, parents: Any, levels: Any, came: Any, seen: Any) -> Any:
    """Count how a draft fared against the tokens that came: the children of the context and of each node on their way.

    Args:
        tokens: int32 [n], read-only.
        parents: int16 [n], read-only.
        levels: uint8 [n], read-only.
        came: int32 [any], read-only.
        seen: float64 [2, bands, 2], is added to: what the drafter expected of these nodes, and which were right.
    """
    node = -1
    for token in came:
        deeper = 1 if node >= 0 else 0
        next_node = -1
        for i in range(node + 1, len(tokens)):
            if parents[i] != node:
                continue
            steps = _steps_to(levels, i, node)
            band = _band_of(steps)
            seen[deeper, band, 0] += _PROBS[steps]
            if tokens[i] == token:
                seen[deeper, band, 1] += 1.0
                next_node = i
        if next_node < 0:
            break
        node = next_node


@leaf_kernel
def _steps_to(levels: Any, node: Any, parent: Any) -> Any:
    """Return the levels between a node and its parent: those of the chance that it follows."""
    before = np.int64(levels[parent]) if parent >= 0 else np.int64(0)
    return max(np.int64(0), np.int64(levels[node]) - before)


@leaf_kernel
def _band_of(steps: Any) -> Any:
    """Return the band of probability of a number of levels."""
    return min(steps // _LEVELS_PER_BAND, BANDS - 1)
