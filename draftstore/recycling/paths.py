"""The static tree of Token Recycling: which candidates are drafted, and how likely each is.

A node is a *rank path*, one digit per token: 0 is the likeliest successor of the text's last token, 02 the third
likeliest successor of that one. The tokens are looked up for each draft (`draftstore.recycling.kernels`).

    row of the text's last token  a: b c       path   0   1   00  01  10
    rows of its candidates        b: d e       token  b   c   d   e   d
                                  c: d

The probability of a path is that of its parent times the rate of its last rank. Rates are constants: those counted in
the text accept as much (docs/findings.md).

In addition to the paths, there are up to eight *guesses*: likely candidates of the previous pass, which often come next
(LogitSpec, https://arxiv.org/abs/2507.01449). The tree below a guess is that below path 1.
"""

import numpy as np
from numpy.typing import NDArray

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
