"""Token Recycling: drafts from the candidates that the model computes during decoding and usually discards.

A matrix holds, for each token, the 8 most likely successors when the model last saw it, distinct and filled up with -1.
A draft is a static tree (`draftstore.drafting.rank_tree`) filled from the matrix: the child of rank r of a node with
token t is matrix[t, r]. After each pass the rows of all verified tokens are updated, including rejected ones.

    drafter = RecyclingDrafter(model.config.vocab_size)      # or RecyclingStore.open(...).drafter()
    session = drafter.session(prompt_ids, candidates=top8)   # the matrix is shared: the next text starts warm

"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL 2025,
https://arxiv.org/abs/2408.08696. Its matrix lies on the model's device; this one lies in host memory, where six
dependent lookups are free and a draft needs no copy: the top 8 arrive with the tokens that are copied anyway.
"""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget, check_ids
from draftstore.drafting.rank_matrix import count_paths, fill_rows, fill_tree, recycle, write_rows
from draftstore.drafting.rank_tree import WIDTH, RankTree
from draftstore.errors import DraftstoreError
from draftstore.jit import as_input, read_only
from draftstore.trees.tree import DraftTree

UNKNOWN: NDArray[np.int32] = np.full(WIDTH, -1, np.int32)
"""Candidates of an unknown pass."""
WINDOW = 4096
"""Counts are halved when a path reaches twice as many tries, so that they follow recent texts."""


class RecyclingDrafter:
    """The matrix and the counts of one model, shared and updated by all its sessions.

    Threads may share it: drafts and updates are serialised. Drafts are reproducible only if a single thread decodes.

    Attributes:
        matrix: int32 [vocab_size, 8], read-only, the candidates of each token, best first; filled up with -1.
        tree: the static tree, with the counts of its paths.
    """

    needs_candidates = True

    def __init__(
        self, vocab_size: int, *, matrix: NDArray[np.integer[Any]] | None = None, tree: RankTree | None = None
    ) -> None:
        """Start empty, or from a matrix, int [at most vocab_size, at most 8]; see `seed`."""
        if not 1 <= vocab_size < 2**31:
            raise DraftstoreError(f"a vocabulary of {vocab_size:,} ids: expected 1 to {2**31 - 1:,}")
        self.vocab_size = vocab_size
        self._matrix: NDArray[np.int32] = np.full((vocab_size, WIDTH), -1, np.int32)
        self.matrix = read_only(self._matrix)
        self.tree = RankTree() if tree is None else tree
        self._lock = Lock()
        if matrix is not None:
            self.seed(matrix)

    def seed(self, matrix: NDArray[np.integer[Any]]) -> None:
        """Fill empty rows from a matrix; ids outside the vocabulary and duplicates in a row are dropped."""
        rows = np.ascontiguousarray(matrix, np.int32)
        if rows.ndim != 2 or len(rows) > self.vocab_size or rows.shape[1] > WIDTH:
            raise DraftstoreError(
                f"candidates of shape {rows.shape}: expected at most {self.vocab_size:,} tokens by {WIDTH}"
            )
        with self._lock:
            fill_rows(self._matrix, read_only(rows))

    def snapshot(self) -> tuple[NDArray[np.int32], RankTree]:
        """Return consistent copies of the matrix and the tree."""
        with self._lock:
            tree = self.tree
            counts = tree.tries.tolist(), tree.hits.tolist()
            return self._matrix.copy(), RankTree(tree.paths, *counts)

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        candidates: NDArray[np.int32] | None = None,
        **_prefill: Any,
    ) -> "RecyclingSession":
        """Start the drafts of one text; see `Drafter.session`. A row of -1 is unknown."""
        return RecyclingSession(self, prompt_ids, candidates)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        spare = RecyclingDrafter(2, matrix=np.array([[1]], np.int32))
        session = spare.session([1, 0], candidates=np.array([[0]], np.int32))
        tree = session.propose()
        session.observe([1, 0], tree=tree, candidates=np.zeros((len(tree) + 1, WIDTH), np.int32))

    def _propose(self, last: int, before: NDArray[np.int32], budget: int, max_level: int) -> DraftTree:
        tree = self.tree
        with self._lock:
            arrays = fill_tree(
                self._matrix, last, before, tree.parents, tree.ranks, tree.starts, tree.tries, tree.hits,
                tree.guesses, tree.below_guess, min(budget, (1 + WIDTH) * (1 + len(tree))), max_level,
            )  # fmt: skip
        return DraftTree(*arrays)

    def _learn(
        self, last: int, before: NDArray[np.int32], accepted: Any, tree: DraftTree, candidates: Any
    ) -> NDArray[np.int32]:
        """Count correct paths, then write the rows of a verified tree; return the row that predicted the last token."""
        static = self.tree
        with self._lock:
            count_paths(
                self._matrix, last, before, accepted, static.ranks, static.starts, static.tries, static.hits,
                static.guesses, WINDOW,
            )  # fmt: skip
            if candidates is None:
                return UNKNOWN
            tokens, parents = as_input(tree.tokens, np.int32), as_input(tree.parents, np.int16)
            recycle(self._matrix, last, accepted, tokens, parents, candidates)
            # Of all rows of its token, that of the last accepted node has won.
            return self._row(int(accepted[-2]) if len(accepted) > 1 else last)

    def _learn_prompt(self, ids: NDArray[np.int32], candidates: NDArray[np.int32]) -> NDArray[np.int32]:
        """Write the rows of consecutive tokens of a prompt, in order; return the last one."""
        with self._lock:
            write_rows(self._matrix, ids, candidates)
            return self._row(int(ids[-1]))

    def _row(self, token: int) -> NDArray[np.int32]:
        row: NDArray[np.int32] = self._matrix[token].copy()
        return row


class RecyclingSession:
    """The drafts for one text: a `Session` that knows its last token and updates the drafter's matrix."""

    needs_candidates = True
    needs_hidden = False

    def __init__(
        self, drafter: RecyclingDrafter, prompt_ids: ArrayLike, candidates: NDArray[np.int32] | None = None
    ) -> None:
        self._drafter = drafter
        ids = check_ids(prompt_ids, drafter.vocab_size)
        self._last = int(ids[-1]) if len(ids) else -1
        self._before = UNKNOWN
        if candidates is not None and len(candidates) and len(ids) > 1:
            rows = _candidates(candidates, None)[-(len(ids) - 1) :]
            self._before = drafter._learn_prompt(as_input(ids[-1 - len(rows) : -1], np.int32), rows)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft; see `Session`."""
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0 or self._last < 0:
            return DraftTree.empty()
        return self._drafter._propose(self._last, self._before, budget, level)

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        **_feedback: Any,
    ) -> None:
        """Learn the result of a forward pass; see `Session`.

        Paths are counted along the accepted ids as far as the matrix predicted them, whether or not a node was
        verified. Rows are written for the nodes of `tree`; if a token occurs several times, accepted occurrences win
        over rejected ones, then the last wins. Without a tree only the root's row is written.

        Raises:
            TokenRangeError: an id outside the vocabulary.
            DraftstoreError: candidates that are not one row for the root and each node.
        """
        ids = check_ids(accepted_ids, self._drafter.vocab_size)
        rows = None if candidates is None else _candidates(candidates, 0 if tree is None else len(tree))
        if len(ids) == 0:
            return
        known = tree or DraftTree.empty()
        before, self._before = self._before, UNKNOWN
        if self._last >= 0 and (tree is not None or rows is not None):
            row = self._drafter._learn(self._last, before, as_input(ids, np.int32), known, rows)
            self._before = row if len(ids) <= len(known) + 1 else UNKNOWN
        self._last = int(ids[-1])


def _candidates(candidates: NDArray[np.int32], nodes: int | None) -> NDArray[np.int32]:
    """Return candidates, one row for the root and each node, in the form that the kernels expect."""
    rows = np.asarray(candidates)
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or (nodes is not None and len(rows) != nodes + 1):
        wanted = "any" if nodes is None else nodes + 1
        raise DraftstoreError(
            f"candidates are int32 [{wanted}, {WIDTH}], found an array of shape {rows.shape} and type {rows.dtype}"
        )
    return as_input(rows, np.int32)
