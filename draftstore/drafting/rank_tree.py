"""The static tree of Token Recycling: which candidates are drafted, and how often each was correct.

A node is a *rank path*, one digit per token: 0 is the likeliest successor of the text's last token, 02 the third
likeliest successor of that one. The tokens are looked up for each draft (`draftstore.drafting.recycling`).

    row of the text's last token  a: b c       path   0   1   00  01  10
    rows of its candidates        b: d e       token  b   c   d   e   d
                                  c: d

The probability of a path is that of its parent times the rate at which its last rank was correct given the parent. So a
child is never likelier than its parent, and counts do not depend on how much of the tree was drafted. The rate of a
rarely tried path is shrunk towards its rank's rate over all paths, and that towards a prior from other texts.

Beside the paths stand up to eight *guesses*: likely candidates of the pass before, which often come next
(LogitSpec, https://arxiv.org/abs/2507.01449). A guess of rank r has a rate of its own; below it the tree is that
below the path `BELOW_GUESS`.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError
from draftstore.jit import kernel
from draftstore.trees.frontier import MAX_DEPTH

WIDTH = 8
"""Candidates per token: ranks are 0 to 7."""
MAX_PATHS = 1024
"""Maximum nodes of a static tree."""

# Figure 3 and appendix A of "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
# Recycling" (https://arxiv.org/abs/2408.08696): 8, 21, 25, 15, 8 and 3 nodes. `00-07` is 00, 01, ... 07.
PAPER_TREE = """
0-7
00-07 10-13 20-22 30 31 40 50 60 70
000-007 010-012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000-0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000-00002 00010 00020 00100 01000 10000
000000 000001 000100
"""

PRIOR: NDArray[np.float64] = np.array([0.40, 0.10, 0.055, 0.03, 0.025, 0.02, 0.016, 0.013])
"""Prior rate of each rank, measured with SmolLM2-135M in its first 16 answers."""
PRIOR_TRIES = 32.0
"""Weight of `PRIOR` in tries of a rank."""
SHARED_TRIES = 32.0
"""Weight of a rank's rate over all paths, in tries of one path."""
GUESS_PRIOR: NDArray[np.float64] = np.array([0.04, 0.03, 0.015, 0.015, 0.015, 0.012, 0.006, 0.005])
"""Prior rate of each guess, measured with the same model; the first is the model's own token, unless it is sampled."""
BELOW_GUESS = "1"
"""The path whose subtree continues a guess."""


def parse_paths(text: str) -> list[str]:
    """Return the rank paths of the notation in `PAPER_TREE`."""
    paths = []
    for word in text.split():
        first, _, last = word.partition("-")
        paths += [f"{first[:-1]}{rank}" for rank in range(int(first[-1]), int((last or first)[-1]) + 1)]
    return paths


class RankTree:
    """A static tree with the counts of its n paths.

    Attributes:
        paths: rank paths, by length, then ascending; siblings are adjacent.
        parents: int64 [n], index of the parent, -1 for the root.
        ranks: int64 [n], last digit of each path.
        starts: int64 [n + 2], children of the root are starts[0] to starts[1], those of path i starts[i + 1] to
            starts[i + 2].
        tries: int64 [n], how often a path's parent was correct and its cell of the matrix had a token.
        hits: int64 [n], how often that token was correct.
        guesses: int64 [2, 8], tries and hits of the guess of each rank. They start anew with each object.
        below_guess: index of the path that continues a guess, -1 if there is none.
    """

    def __init__(
        self,
        paths: Sequence[str] | None = None,
        tries: Sequence[int] | None = None,
        hits: Sequence[int] | None = None,
    ) -> None:
        """Create a tree, by default the paper's, with the counts of its paths, by default zero.

        Raises:
            DraftstoreError: paths that are not a tree, or counts that are not one per path, with hits above tries.
        """
        given = parse_paths(PAPER_TREE) if paths is None else list(paths)
        columns = [[0] * len(given) if column is None else list(column) for column in (tries, hits)]
        counts = _counts(given, *columns)
        self.paths = tuple(sorted(counts, key=lambda path: (len(path), path)))
        places = {path: place for place, path in enumerate(("", *self.paths))}
        slots = np.array([places[path[:-1]] for path in self.paths], np.int64)
        self.parents: NDArray[np.int64] = slots - 1
        self.ranks = np.array([int(path[-1]) for path in self.paths], np.int64)
        self.starts = np.searchsorted(slots, np.arange(len(slots) + 2)).astype(np.int64)
        self.tries = np.array([counts[path][0] for path in self.paths], np.int64)
        self.hits = np.array([counts[path][1] for path in self.paths], np.int64)
        self.guesses: NDArray[np.int64] = np.zeros((2, WIDTH), np.int64)
        self.below_guess = self.paths.index(BELOW_GUESS) if BELOW_GUESS in counts else -1

    def __len__(self) -> int:
        return len(self.paths)

    def probs(self) -> NDArray[np.float64]:
        """float64 [n], probability of each path if all its cells have tokens."""
        return np.asarray(path_probs(self.parents, self.ranks, self.tries, self.hits))

    def resized(self, nodes: int) -> "RankTree":
        """Return a tree of 1 to `MAX_PATHS` nodes with these counts: the likeliest of this one, extended if need be.

        The probability of a new path is its parent's, times the rate of its last rank over all paths.
        """
        if not 1 <= nodes <= MAX_PATHS:
            raise DraftstoreError(f"a static tree of {nodes} nodes: expected 1 to {MAX_PATHS}")
        rows = {
            path: (prob, tried, hit)
            for path, prob, tried, hit in zip(
                self.paths, self.probs().tolist(), self.tries.tolist(), self.hits.tolist(), strict=True
            )
        }
        best = sorted(rows, key=lambda path: (-rows[path][0], len(path), path))[:nodes]
        grown = {path: rows[path] for path in best}
        self._grow(grown, nodes)
        return RankTree(list(grown), *([row[column] for row in grown.values()] for column in (1, 2)))

    def _grow(self, rows: dict[str, tuple[float, int, int]], nodes: int) -> None:
        """Add the likeliest paths, with probability, tries and hits of each, until there are `nodes`."""
        rates = rank_rates(self.ranks, self.tries, self.hits).tolist()
        waiting: list[tuple[float, int, str]] = []

        def wait_for_children(path: str, prob: float) -> None:
            for rank, rate in enumerate(rates if len(path) < MAX_DEPTH else ()):
                if f"{path}{rank}" not in rows:
                    heapq.heappush(waiting, (-prob * rate, len(path) + 1, f"{path}{rank}"))

        wait_for_children("", 1.0)
        for path, (prob, _, _) in list(rows.items()):
            wait_for_children(path, prob)
        while len(rows) < nodes:
            negative, _, path = heapq.heappop(waiting)
            rows[path] = (-negative, 0, 0)
            wait_for_children(path, -negative)


def _counts(paths: list[str], tries: list[int], hits: list[int]) -> dict[str, tuple[int, int]]:
    """Return tries and hits by path, if they are a valid tree, see `RankTree`."""
    if not len(paths) == len(tries) == len(hits):
        raise DraftstoreError(f"{len(paths)} rank paths with {len(tries)} tries and {len(hits)} hits")
    counts = dict(zip(paths, zip(tries, hits, strict=True), strict=True))
    if not 1 <= len(paths) <= MAX_PATHS or len(counts) != len(paths):
        raise DraftstoreError(f"{len(paths)} rank paths: expected 1 to {MAX_PATHS}, each once")
    for path, (tried, hit) in counts.items():
        if not path or not set(path) <= set("01234567") or len(path) > MAX_DEPTH:
            raise DraftstoreError(f"the rank path {path!r}: expected 1 to {MAX_DEPTH} digits from 0 to 7")
        if len(path) > 1 and path[:-1] not in counts:
            raise DraftstoreError(f"the rank path {path!r} stands without its parent {path[:-1]!r}")
        if not 0 <= hit <= tried < 2**62:
            raise DraftstoreError(f"the rank path {path!r} with {hit} hits of {tried} tries")
    return counts


@kernel
def rank_rates(ranks: Any, tries: Any, hits: Any) -> Any:
    """Return float64 [8], the rate of correct tokens for each rank over all paths, see `path_probs`."""
    tried, hit = np.zeros(WIDTH, np.int64), np.zeros(WIDTH, np.int64)
    for i in range(len(ranks)):
        tried[ranks[i]] += tries[i]
        hit[ranks[i]] += hits[i]
    return (hit + PRIOR_TRIES * PRIOR) / (tried + PRIOR_TRIES)


@kernel
def path_probs(parents: Any, ranks: Any, tries: Any, hits: Any) -> Any:
    """Return float64 [n], the probability of each path of a `RankTree`, at most its parent's."""
    rates = rank_rates(ranks, tries, hits)
    probs = np.empty(len(ranks), np.float64)
    for i in range(len(ranks)):
        above = probs[parents[i]] if parents[i] >= 0 else 1.0
        rate = (hits[i] + SHARED_TRIES * rates[ranks[i]]) / (tries[i] + SHARED_TRIES)
        probs[i] = above * rate
    return probs
