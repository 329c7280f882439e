"""Token Recycling: drafts from the candidates that the model itself has computed, and that decoding throws away.

A matrix holds, for each token, the 8 most likely tokens that followed it when the model last saw it. A draft is a
static tree (`draftstore.drafting.rank_tree`) whose nodes are looked up in it, candidate by candidate: the child of
rank r of a node with token t is matrix[t, r]. After each pass the rows of all verified tokens are written anew, also
of rejected ones.

    drafter = RecyclingDrafter(model.config.vocab_size)      # or RecyclingStore.open(...).drafter()
    session = drafter.session(prompt_ids, candidates=top8)   # the matrix is shared: the next text starts hot

"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL 2025,
https://arxiv.org/abs/2408.08696. Its matrix lies on the model's device; this one lies in the host's memory, where six
dependent lookups cost nothing and a draft needs no copy: the top 8 arrive with the tokens that are copied anyway.

Every row of the matrix holds different tokens, and -1 where there is none. So siblings differ, and nothing is invented.
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

WINDOW = 4096
"""Counts are halved when a path has been tried twice as often, so that they follow the last texts."""


class RecyclingDrafter:
    """The matrix and the counts of one model, which all its sessions share and feed.

    Threads may share it: one draft or one update is made at a time. Drafts are the same from run to run only where
    one thread decodes.

    Attributes:
        vocab_size: token ids lie in [0, vocab_size).
        matrix: int32 [vocab_size, 8], read-only, the candidates of each token, best first; -1 is none.
        tree: the static tree, with the counts of its paths.
    """

    def __init__(
        self, vocab_size: int, *, matrix: NDArray[np.integer[Any]] | None = None, tree: RankTree | None = None
    ) -> None:
        """Start cold, or from a matrix.

        Args:
            vocab_size: ids that the model may emit.
            matrix: int [at most vocab_size, at most 8], copied; ids outside the vocabulary, and those that stand
                twice in a row, are left out.
            tree: the static tree; by default the paper's, of 80 nodes. It becomes this object's own.

        Raises:
            DraftstoreError: no ids, or a matrix of another shape.
        """
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
        """Fill the rows that hold nothing yet.

        Args:
            matrix: as in `RecyclingDrafter`.

        Raises:
            DraftstoreError: a matrix of another shape.
        """
        rows = np.ascontiguousarray(matrix, np.int32)
        if rows.ndim != 2 or len(rows) > self.vocab_size or rows.shape[1] > WIDTH:
            raise DraftstoreError(
                f"candidates of shape {rows.shape}: expected at most {self.vocab_size:,} tokens by {WIDTH}"
            )
        with self._lock:
            fill_rows(self._matrix, read_only(rows))

    def snapshot(self) -> tuple[NDArray[np.int32], RankTree]:
        """Return copies of the matrix and the tree, as they are at one moment."""
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
        """Start the drafts of one text; see `Drafter.session`.

        Args:
            prompt_ids: int32 [any], the prompt and the token that the prefill yielded.
            candidates: int32 [m, 8], the model's top 8 at the last m tokens of the prompt; the last row is where it
                predicted the last id.

        Raises:
            TokenRangeError: an id of the prompt lies outside the vocabulary.
            DraftstoreError: candidates of another shape.
        """
        return RecyclingSession(self, prompt_ids, candidates)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft is waited for."""
        spare = RecyclingDrafter(2, matrix=np.array([[1]], np.int32))
        session = spare.session([1, 0], candidates=np.array([[0]], np.int32))
        tree = session.propose()
        session.observe([1, 0], tree=tree, candidates=np.zeros((len(tree) + 1, WIDTH), np.int32))

    def _propose(self, last: int, budget: int, max_level: int) -> DraftTree:
        tree = self.tree
        with self._lock:
            arrays = fill_tree(
                self._matrix, last, tree.parents, tree.ranks, tree.starts, tree.tries, tree.hits,
                min(budget, len(tree)), max_level,
            )  # fmt: skip
        return DraftTree(*arrays)

    def _learn(self, last: int, accepted: Any, tree: DraftTree, candidates: Any) -> None:
        """Count what came true, then write the rows of a verified tree."""
        static = self.tree
        with self._lock:
            count_paths(
                self._matrix, last, accepted, static.ranks, static.starts, static.tries, static.hits, WINDOW
            )
            if candidates is not None:
                tokens, parents = as_input(tree.tokens, np.int32), as_input(tree.parents, np.int16)
                recycle(self._matrix, last, accepted, tokens, parents, candidates)

    def _learn_prompt(self, ids: NDArray[np.int32], candidates: NDArray[np.int32]) -> None:
        """Write the rows of tokens that follow each other in a prompt, the last one last."""
        with self._lock:
            write_rows(self._matrix, ids, candidates)


class RecyclingSession:
    """The drafts of one text: a `Session` that remembers its last token, and feeds the drafter's matrix."""

    needs_candidates = True
    needs_hidden = False

    def __init__(
        self, drafter: RecyclingDrafter, prompt_ids: ArrayLike, candidates: NDArray[np.int32] | None = None
    ) -> None:
        """Start from a prompt; see `RecyclingDrafter.session`."""
        self._drafter = drafter
        ids = check_ids(prompt_ids, drafter.vocab_size)
        self._last = int(ids[-1]) if len(ids) else -1
        if candidates is not None and len(ids) > 1:
            rows = _candidates(candidates, None)[-(len(ids) - 1) :]
            drafter._learn_prompt(as_input(ids[-1 - len(rows) : -1], np.int32), rows)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        """Return a draft of at most `budget` nodes, each of at least `min_prob`; see `Session`.

        Raises:
            DraftstoreError: the budget is not within 0 .. 4,096.
        """
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0 or self._last < 0:
            return DraftTree.empty()
        return self._drafter._propose(self._last, budget, level)

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        **_feedback: Any,
    ) -> None:
        """Take in what a forward pass settled; see `Session`.

        The tree may be any that begins behind the text's last token: proposed here or not, whole, trimmed or merged.
        Paths are counted along the accepted ids, as far as the matrix had foretold them: what the model said there
        is known, whether a node was verified or not. Rows are written for the nodes of `tree`; an accepted
        occurrence of a token wins over a rejected one, then the last one. Without a tree there is one row, the root.

        Raises:
            TokenRangeError: an id outside the vocabulary.
            DraftstoreError: candidates that are not one row for the root and each node.
        """
        ids = check_ids(accepted_ids, self._drafter.vocab_size)
        rows = None if candidates is None else _candidates(candidates, 0 if tree is None else len(tree))
        if len(ids) == 0:
            return
        if self._last >= 0 and (tree is not None or rows is not None):
            self._drafter._learn(self._last, as_input(ids, np.int32), tree or DraftTree.empty(), rows)
        self._last = int(ids[-1])


def _candidates(candidates: NDArray[np.int32], nodes: int | None) -> NDArray[np.int32]:
    """Return candidates as the kernels take them.

    Raises:
        DraftstoreError: not a matrix of one row for the root and each node.
    """
    rows = np.asarray(candidates)
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or (nodes is not None and len(rows) != nodes + 1):
        wanted = "any" if nodes is None else nodes + 1
        raise DraftstoreError(
            f"candidates are int32 [{wanted}, {WIDTH}], found an array of shape {rows.shape} and type {rows.dtype}"
        )
    return as_input(rows, np.int32)
