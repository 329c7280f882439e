"""Calibration of a drafter's probabilities within a text, and the prefix of a draft to verify: kernels of the planner.

All of this concerns the probability of a node given its parent: its own probability divided by its parent's. It is what
the drafter claims about one more token, and can be checked whenever the text passes through the parent.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel, leaf_kernel
from draftstore.trees.tree import LEVEL_PROBS
from draftstore.trees.walk import steps_below, walk

BANDS = 16
"""Number of probability bands, half an octave each; the last one includes all lower values."""
TRUST = 4.0
"""Weight of the drafter's own probabilities in accepted nodes, overall and in each band."""
LENGTH_BANDS = 6
"""Bands of accepted tokens in a pass: the first, the second, the next two, four and eight, and all others."""
_LEVELS_PER_BAND = 8
_PROBS: NDArray[np.float64] = LEVEL_PROBS.astype(np.float64)


def band_factors(seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return factors for the drafter's probabilities, float64 [2, bands]: the posterior mean under a Gamma prior.

    Acceptances are modelled as Poisson events with `factor` times the drafter's expectation. The factor over all
    children of the context, or all deeper nodes, is shrunk towards 1; that of a probability band, towards the former.
    `seen` float64 [2, bands, 2]: expected and actual acceptances of children of the context, and of deeper nodes.
    """
    whole = seen.sum(axis=1)
    general = (whole[:, 1:] + TRUST) / (whole[:, :1] + TRUST)
    factors: NDArray[np.float64] = (seen[:, :, 1] + TRUST * general) / (seen[:, :, 0] + TRUST)
    return factors


def length_factors(lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return factors for the expected accepted tokens of a whole draft, float64 [LENGTH_BANDS], with the same prior.

    A draft that expects many tokens gets fewer than the sum over its nodes suggests: a drafter's errors are correlated
    within a tree. `lengths` float64 [LENGTH_BANDS, 2]: expected and actual accepted tokens, by expected tokens before.
    """
    shares: NDArray[np.float64] = (lengths[:, 1] + TRUST) / (lengths[:, 0] + TRUST)
    return shares


@kernel
def best_prefix(
    parents: Any, levels: Any, factors: Any, shares: Any, costs: Any, rate: Any, account: Any, expected: Any
) -> Any:
    """Return how many nodes to verify, the fewest among ties; -i - 1 if the parent of node i does not precede it.

    Args:
        parents: int16 [n], and levels uint8 [n], of a draft.
        costs: float64 [at least n + 1], seconds of passes over 1 row, 2 rows, ...
        account: seconds by which the pass may exceed one over 1 row.
        expected: float64 [LENGTH_BANDS], output: accepted tokens that the prefix expects, before `shares`.
    """
    tokens, sums = np.empty(len(parents) + 1), np.empty(len(parents) + 1)
    fault = expect_tokens(parents, levels, factors, shares, tokens, sums)
    if fault < 0:
        return fault
    best, most = 0, 0.0
    for size in range(1, len(tokens)):
        extra = costs[size] - costs[0]
        if extra <= account and tokens[size] - rate * extra > most:
            best, most = size, tokens[size] - rate * extra
    split_sum(sums[best], expected)
    return best


@kernel
def expect_tokens(parents: Any, levels: Any, factors: Any, shares: Any, tokens: Any, sums: Any) -> Any:
    """Compute the accepted tokens that each prefix of n nodes expects; return 0, or a fault as `best_prefix`.

    A node's probability is its parent's times its calibrated probability given its parent.

    Args:
        factors: see `band_factors`.
        shares: see `length_factors`.
        tokens: float64 [n + 1], output: expected tokens of the first 0, 1, 2, ... nodes.
        sums: float64 [n + 1], output: the same before `shares`.
    """
    chances = np.empty(len(parents))
    tokens[0] = sums[0] = 0.0
    for i in range(len(parents)):
        parent = np.int64(parents[i])
        if parent < -1 or parent >= i:
            return -i - 1
        deeper = 1 if parent >= 0 else 0
        steps = steps_below(levels, i, parent)
        follows = min(1.0, _PROBS[steps] * factors[deeper, _band_of(steps)])
        chances[i] = follows * chances[parent] if deeper else follows
        band, here = _split(sums[i], chances[i])
        beyond = chances[i] - here
        tokens[i + 1] = tokens[i] + here * shares[band] + beyond * shares[min(band + 1, LENGTH_BANDS - 1)]
        sums[i + 1] = sums[i] + chances[i]
    return 0


@kernel
def split_sum(total: Any, expected: Any) -> Any:
    """Split a sum of probabilities into bands: float64 [LENGTH_BANDS], output."""
    begin, end = 0.0, 1.0
    for band in range(LENGTH_BANDS):
        last = band == LENGTH_BANDS - 1
        expected[band] = max(0.0, (total if last else min(total, end)) - begin)
        begin, end = end, end * 2.0


@leaf_kernel
def _split(total: Any, chance: Any) -> Any:
    """Return the band after `total` expected tokens, and the part of a probability in it; the next has the rest."""
    band, end = 0, 1.0
    while total >= end and band < LENGTH_BANDS - 1:
        band += 1
        end *= 2.0
    return band, chance if band == LENGTH_BANDS - 1 else min(chance, end - total)


@kernel
def count_lengths(expected: Any, accepted: Any, lengths: Any) -> Any:
    """Count expected (see `split_sum`) and actual accepted tokens of a pass in `lengths`, see `length_factors`."""
    for band in range(LENGTH_BANDS):
        if expected[band] > 0.0:
            begin = 0 if band == 0 else 1 << (band - 1)
            end = 1 << band if band < LENGTH_BANDS - 1 else accepted
            lengths[band, 0] += expected[band]
            lengths[band, 1] += max(0, min(accepted, end) - begin)


@kernel
def count_outcomes(tokens: Any, parents: Any, levels: Any, ids: Any, seen: Any) -> Any:
    """Count in `seen`, see `band_factors`, a draft's children along the next tokens, int32 [any], and the hits."""
    walk(tokens, parents, ids, _count_children, (parents, levels, seen))


@leaf_kernel
def _count_children(state: Any, node: Any, child: Any) -> Any:
    parents, levels, seen = state
    deeper = 1 if node >= 0 else 0
    for i in range(node + 1, len(parents)):
        if parents[i] == node:
            steps = steps_below(levels, i, node)
            seen[deeper, _band_of(steps), 0] += _PROBS[steps]
            seen[deeper, _band_of(steps), 1] += 1.0 if i == child else 0.0


@leaf_kernel
def _band_of(steps: Any) -> Any:
    return min(steps // _LEVELS_PER_BAND, BANDS - 1)
