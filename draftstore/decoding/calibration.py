"""Calibration of a drafter's probabilities in one text, and the prefix of a draft that pays: kernels of the planner.

All of this is about the chance that a node follows its parent, its own probability divided by its parent's: it is what
the drafter says of one more token, and what can be checked whenever the text comes by the parent.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.tree import LEVEL_PROBS
from draftstore.trees.walk import steps_below, walk

BANDS = 16
"""Bands of probability, half an octave each; the last takes all that is lower."""
TRUST = 4.0
"""Accepted nodes that the drafter's own probabilities count for, as a whole and in each band."""
LENGTH_BANDS = 6
"""Bands of accepted tokens in a pass: the first, the second, the next two, four and eight, and all others."""
_LEVELS_PER_BAND = 8
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


def band_factors(seen: NDArray[np.float64]) -> NDArray[np.float64]:
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


def length_factors(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much to multiply the accepted tokens that a whole draft expects, with the same prior.

    A draft that expects many tokens gets fewer than its nodes suggest one by one: what misleads a drafter misleads it
    in all of a tree.

    Args:
        lengths: float64 [LENGTH_BANDS, 2], accepted tokens of passes, expected and real, by how many came before them.

    Returns:
        float64 [LENGTH_BANDS].
    """
    shares: NDArray[np.float64] = (lengths[:, 1] + TRUST) / (lengths[:, 0] + TRUST)
    return shares


@kernel
def best_prefix(
    parents: Any, levels: Any, factors: Any, shares: Any, costs: Any, rate: Any, account: Any, expected: Any
) -> Any:
    """Return how many nodes of a draft are worth verifying, the fewest of equally good numbers.

    A node's chance is its parent's, times the corrected chance that it follows its parent.

    Args:
        parents: int16 [n], read-only.
        levels: uint8 [n], read-only.
        factors: float64 [2, bands], see `band_factors`.
        shares: float64 [LENGTH_BANDS], see `length_factors`.
        costs: float64 [at least n + 1], seconds of passes over 1 row, 2 rows, ...
        rate: tokens per second.
        account: seconds that the pass may take longer than one over 1 row.
        expected: float64 [LENGTH_BANDS], is overwritten: the accepted tokens that the prefix expects, before `shares`.

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
        steps = steps_below(levels, i, parent)
        follows = min(1.0, _PROBS[steps] * factors[deeper, _band_of(steps)])
        chances[i] = follows * chances[parent] if deeper else follows
        band, here = _split(total, chances[i])
        tokens += here * shares[band] + (chances[i] - here) * shares[min(band + 1, LENGTH_BANDS - 1)]
        total += chances[i]
        extra = costs[i + 1] - costs[0]
        if extra <= account and tokens - rate * extra > most:
            best, most = i + 1, tokens - rate * extra
    expected[:] = 0.0
    total = 0.0
    for i in range(best):
        band, here = _split(total, chances[i])
        expected[band] += here
        expected[min(band + 1, LENGTH_BANDS - 1)] += chances[i] - here
        total += chances[i]
    return best


@leaf_kernel
def _split(total: Any, chance: Any) -> Any:
    """Return the band behind `total` expected tokens, and how much of a chance lies in it; the next has the rest."""
    band, end = 0, 1.0
    while total >= end and band < LENGTH_BANDS - 1:
        band += 1
        end *= 2.0
    return band, chance if band == LENGTH_BANDS - 1 else min(chance, end - total)


@kernel
def count_lengths(expected: Any, accepted: Any, lengths: Any) -> Any:
    """Count the accepted tokens that a pass expected and those that came, in the bands where it expected any.

    Args:
        expected: float64 [LENGTH_BANDS], see `best_prefix`.
        accepted: tokens of the draft that were accepted.
        lengths: float64 [LENGTH_BANDS, 2], is added to; see `length_factors`.
    """
    for band in range(LENGTH_BANDS):
        if expected[band] > 0.0:
            begin = 0 if band == 0 else 1 << (band - 1)
            end = 1 << band if band < LENGTH_BANDS - 1 else accepted
            lengths[band, 0] += expected[band]
            lengths[band, 1] += max(0, min(accepted, end) - begin)


@kernel
def count_outcomes(tokens: Any, parents: Any, levels: Any, came: Any, seen: Any) -> Any:
    """Count how a draft fared against the tokens that came: the children of the context and of each node on their way.

    Args:
        tokens: int32 [n], read-only.
        parents: int16 [n], read-only.
        levels: uint8 [n], read-only.
        came: int32 [any], read-only.
        seen: float64 [2, bands, 2], is added to: what the drafter expected of these nodes, and which were right.
    """
    walk(tokens, parents, came, _count_children, (parents, levels, seen))


@leaf_kernel
def _count_children(state: Any, node: Any, child: Any) -> Any:
    """Count what was expected of a node's children, and the one that came; see `draftstore.trees.walk.walk`."""
    parents, levels, seen = state
    deeper = 1 if node >= 0 else 0
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            steps = steps_below(levels, i, node)
            seen[deeper, _band_of(steps), 0] += _PROBS[steps]
            seen[deeper, _band_of(steps), 1] += 1.0 if i == child else 0.0


@leaf_kernel
def _band_of(steps: Any) -> Any:
    """Return the band of probability of a number of levels."""
    return min(steps // _LEVELS_PER_BAND, BANDS - 1)
