"""The static tree of Token Recycling: which candidates are drafted, and how likely each is.

A node is a *rank path*, one digit per token: 0 is the likeliest successor of the text's last token, 02 the third
likeliest successor of that one. The tokens are looked up for each draft (`draftstore.recycling.kernels`).

    row of the text's last token  a: b c       path   0   1   00  01  10
    rows of its candidates        b: d e       token  b   c   d   e   d
                                  c: d

The probability of a path is that of its parent times the rate at which its last rank was correct given the parent. So a
child is never likelier than its parent, and counts do not depend on how much of the tree was drafted. The rate of a
rarely tried path is shrunk towards its rank's rate over all paths, and that rate towards a prior from other texts.

In addition to the paths, there are up to eight *guesses*: likely candidates of the previous pass, which often come next
(LogitSpec, https://arxiv.org/abs/2507.01449). The guesses of each rank have a separate rate; the tree below a guess is
that below path 1.

    counts  int64 [2, n + 8], tries and hits: how often a path's parent was correct and its cell of the matrix had a
            token, and how often that token was correct; the same for the guess of each rank
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel

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

PRIOR: NDArray[np.float64] = np.array([0.40, 0.10, 0.055, 0.03, 0.025, 0.02, 0.016, 0.013])
"""Prior rate of each rank, measured with SmolLM2-135M in its first 16 answers."""
PRIOR_TRIES = 32.0
"""Weight of `PRIOR` and `GUESS_PRIOR` in tries of a rank."""
SHARED_TRIES = 32.0
"""Weight of a rank's rate over all paths, in tries of one path."""
GUESS_PRIOR: NDArray[np.float64] = np.array([0.04, 0.03, 0.015, 0.015, 0.015, 0.012, 0.006, 0.005])
"""Prior rate of each guess, measured with the same model; the first is the model's own token, unless it is sampled."""


def new_counts() -> NDArray[np.int64]:
    """Return zero counts, int64 [2, n + 8]."""
    return np.zeros((2, len(PATHS) + WIDTH), np.int64)


@kernel
def path_probs(counts: Any) -> Any:
    """Return float64 [n + 8], the probability of each path, at most its parent's, and of each guess."""
    tries, hits = counts
    tried, hit = np.zeros(WIDTH, np.int64), np.zeros(WIDTH, np.int64)
    for path in range(len(RANKS)):
        tried[RANKS[path]] += tries[path]
        hit[RANKS[path]] += hits[path]
    rates = (hit + PRIOR_TRIES * PRIOR) / (tried + PRIOR_TRIES)
    probs = np.empty(len(tries), np.float64)
    for path in range(len(RANKS)):
        above = probs[PARENTS[path]] if PARENTS[path] >= 0 else 1.0
        rate = (hits[path] + SHARED_TRIES * rates[RANKS[path]]) / (tries[path] + SHARED_TRIES)
        probs[path] = above * rate
    first = len(RANKS)
    probs[first:] = (hits[first:] + PRIOR_TRIES * GUESS_PRIOR) / (tries[first:] + PRIOR_TRIES)
    return probs
