"""The drafter of Token Recycling: a matrix with the 8 most likely successors of each token when the model last saw it.

A draft is a static tree (`draftstore.recycling.paths`) filled from the matrix: the child of rank r of a node with token
t is matrix[t, r]. After each pass the rows of all verified tokens are updated, including rejected ones.

    drafter = RecyclingDrafter(model.config.vocab_size)      # or draftstore.recycling.store.open_drafter(...)
    session = drafter.session(prompt_ids, candidates=top8)   # the matrix is shared: the next text starts warm

"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL 2025,
https://arxiv.org/abs/2408.08696. Its matrix is on the model's device; this one is in host memory, where six dependent
lookups are free and a draft needs no copy: the top 8 arrive with the tokens that are copied anyway.
"""

from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import check_budget, check_ids
from draftstore.errors import DraftstoreError, require_vocabulary
from draftstore.jit import as_input, read_only
from draftstore.recycling.kernels import fill_tree, learn, write_rows
from draftstore.recycling.paths import PATHS, WIDTH
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree

UNKNOWN: NDArray[np.int32] = np.full(WIDTH, -1, np.int32)
"""Candidates of an unknown pass."""
NO_ROWS = as_input(np.empty((0, WIDTH)), np.int32)


class RecyclingDrafter:
    """The matrix of one model, shared and updated by all its sessions.

    Threads may share it: drafts and updates are serialised. Drafts are reproducible only if a single thread decodes.

    Attributes:
        matrix: int32 [vocab_size, 8], read-only, the candidates of each token, best first; padded with -1.
        cells: the writable matrix; sessions write to it under `lock`.
    """

    needs_candidates = True

    def __init__(self, vocab_size: int, *, matrix: NDArray[np.integer[Any]] | None = None) -> None:
        """Start empty, or from candidates of the first tokens, int [any, any]; ignore duplicates and invalid ids."""
        require_vocabulary(vocab_size)
        self.vocab_size = vocab_size
        self.cells: NDArray[np.int32] = np.full((vocab_size, WIDTH), -1, np.int32)
        self.matrix = read_only(self.cells)
        self.lock = Lock()
        if matrix is not None and len(matrix):
            rows = _candidates(matrix)
            write_rows(self.cells, as_input(np.arange(len(rows)), np.int32), rows)

    def session(
        self, prompt_ids: ArrayLike, *, candidates: NDArray[np.int32] | None = None, **_prefill: Any
    ) -> "RecyclingSession":
        """Start the drafts of one text; see `Drafter.session`. A row of -1 is unknown."""
        return RecyclingSession(self, prompt_ids, candidates)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        spare = RecyclingDrafter(2, matrix=np.array([[1]], np.int32))
        session = spare.session([1, 0], candidates=np.array([[0]], np.int32))
        tree = session.propose()
        session.observe([1, 0], tree=tree, candidates=np.zeros((len(tree) + 1, WIDTH), np.int32))


class RecyclingSession:
    """The drafts for one text: a `Session` that knows its last token and updates the drafter's matrix."""

    needs_candidates = True
    needs_hidden = False

    def __init__(
        self, drafter: RecyclingDrafter, prompt_ids: ArrayLike, candidates: NDArray[np.int32] | None = None
    ) -> None:
        self._drafter = drafter
        ids = as_input(check_ids(prompt_ids, drafter.vocab_size, parts=True), np.int32)
        self._last = int(ids[-1]) if len(ids) else -1
        self._before = UNKNOWN
        if candidates is not None and len(candidates) and len(ids) > 1:
            rows = _candidates(candidates)[-(len(ids) - 1) :]
            tokens = ids[-1 - len(rows) : -1]
            known = tokens >= 0
            with drafter.lock:
                before = write_rows(drafter.cells, tokens[known], rows[known]) if known.any() else UNKNOWN
            self._before = before if known[-1] else UNKNOWN

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft; see `Session`."""
        level = check_budget(budget, min_prob)
        if budget == 0 or level < 0 or self._last < 0:
            return DraftTree.empty()
        drafter, most = self._drafter, (1 + WIDTH) * (1 + len(PATHS))
        size = min(budget, most)
        with drafter.lock:
            return DraftTree(*fill_tree(drafter.cells, self._last, self._before, size, level))

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        **_feedback: Any,
    ) -> None:
        """Learn the result of a forward pass; see `Session`.

        Rows are written for the nodes of `tree`; if a token occurs several times, accepted occurrences win
        over rejected ones, then the last wins. Without a tree, only the root's row is written.

        Raises:
            TokenRangeError: an id is outside the vocabulary.
            DraftstoreError: `candidates` does not have one row for the root and each node.
        """
        drafter, known = self._drafter, tree or DraftTree.empty()
        ids = as_input(check_ids(accepted_ids, drafter.vocab_size, parts=True), np.int32)
        rows = NO_ROWS if candidates is None else _candidates(candidates, len(known) + 1)
        if len(ids) == 0:
            return
        self._before = UNKNOWN
        if self._last >= 0 <= ids.min() and (tree is not None or candidates is not None):
            tokens, parents = as_input(known.tokens, np.int32), as_input(known.parents, np.int16)
            with drafter.lock:
                self._before = learn(drafter.cells, self._last, ids, tokens, parents, rows)
        self._last = int(ids[-1])


def _candidates(candidates: NDArray[Any], count: int | None = None) -> NDArray[np.int32]:
    """Return candidates, one row for each of `count` tokens, in the form that the kernels expect."""
    rows = np.asarray(candidates)
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or count not in (None, len(rows)):
        raise DraftstoreError(
            f"candidates must be int32 [{count or 'any'}, {WIDTH}], found an array of shape {rows.shape} and type "
            f"{rows.dtype}"
        )
    return as_input(rows, np.int32)
