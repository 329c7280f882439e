"""The drafter of Token Recycling: a matrix with the 8 most likely successors of each token when the model last saw it.

A draft is a static tree (`recycling.kernels`) filled from the matrix: the child of rank r of a node with token t is
matrix[t, r]. After each pass the rows of all verified tokens are updated, including rejected ones.

    drafter = RecyclingDrafter(model.config.vocab_size)      # or draftstore.recycling.store.open_drafter(...)
    session = drafter.session(prompt_ids, candidates=top8)   # the matrix is shared: the next text starts warm

"Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", ACL 2025,
https://arxiv.org/abs/2408.08696. Its matrix is on the model's device; this one is in host memory, where six dependent
lookups are free and a draft needs no copy: the top 8 arrive with the tokens that are copied anyway.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_budget
from draftstore.drafting.slots import SlotDrafter, Slots, enlarged
from draftstore.drafting.sources import Prefill, Results, SlotSource
from draftstore.errors import DraftstoreError, require_vocabulary
from draftstore.jit import as_input, read_only
from draftstore.recycling.kernels import PATHS, WIDTH, fill_trees, learn, write_rows
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree

MOST = (1 + WIDTH) * (1 + len(PATHS))
"""Maximum nodes of a draft."""
NO_ROWS = as_input(np.empty((0, WIDTH)), np.int32)


class RecyclingDrafter(SlotDrafter):
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

    def open_source(self, slots: Slots) -> "RecyclingSource":
        """Return the source of texts in slots."""
        return RecyclingSource(self, slots)

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache, before the first draft."""
        spare = RecyclingDrafter(2, matrix=np.array([[1]], np.int32))
        session = spare.session([1, 0], candidates=np.array([[0]], np.int32))
        tree = session.propose()
        session.observe([1, 0], tree=tree, candidates=np.zeros((len(tree) + 1, WIDTH), np.int32))


class RecyclingSource(SlotSource):
    """The last token of each text and the candidates of the pass that emitted it; all update the drafter's matrix."""

    def __init__(self, drafter: RecyclingDrafter, slots: Slots) -> None:
        self._drafter, self._slots = drafter, slots
        self.vocab_size = drafter.vocab_size
        self._lasts, self._befores = np.empty(0, np.int64), np.empty((0, WIDTH), np.int32)

    def needs(self, slot: int) -> tuple[bool, bool]:  # noqa: ARG002
        """Return that texts need candidates."""
        return True, False

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:  # noqa: ARG002
        """Start a text with the candidates of its prompt; a row of -1 is unknown."""
        ids, candidates = prefill.ids, prefill.candidates
        self._lasts = enlarged(self._lasts, self._slots.capacity)
        self._befores = enlarged(self._befores, self._slots.capacity)
        self._lasts[slot] = ids[-1] if len(ids) else -1
        self._befores[slot] = -1
        if candidates is not None and len(candidates) and len(ids) > 1:
            rows = _candidates(candidates)[-(len(ids) - 1) :]
            tokens = ids[-1 - len(rows) : -1]
            known = tokens >= 0
            if known.any():
                cells = self._drafter.cells
                with self._drafter.lock:
                    before = write_rows(
                        cells, as_input(tokens[known], np.int32), as_input(rows[known], np.int32)
                    )
                if known[-1]:
                    self._befores[slot] = before

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts; see `SlotSource`."""
        size, level = min(budget, MOST), check_budget(budget, min_prob)
        with self._drafter.lock:
            return DraftBatch.plain(
                *fill_trees(self._drafter.cells, self._lasts, self._befores, slots, size, level)
            )

    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception]:
        """Learn the results of a forward pass, text by text; see `SlotSource`.

        Rows are written for the nodes of a tree; if a token occurs several times, accepted occurrences win over
        rejected ones, then the last wins. Without a tree, only the root's row is written.
        """
        errors: dict[int, Exception] = {}
        for place in places.tolist():
            verified, candidates, new = results.trees[place], results.candidates[place], results.new(place)
            tree = verified or DraftTree.empty()
            try:
                rows = NO_ROWS if candidates is None else _candidates(candidates, len(tree) + 1)
            except DraftstoreError as error:
                errors[place] = error
                continue
            if len(new):
                slot = int(results.slots[place])
                self._learn(slot, new, tree, rows if len(rows) or verified is not None else None)
        return errors

    def _learn(
        self, slot: int, new: NDArray[np.int32], tree: DraftTree, rows: NDArray[np.int32] | None
    ) -> None:
        last, self._befores[slot] = int(self._lasts[slot]), -1
        if last >= 0 <= new.min() and rows is not None:
            tokens, parents = as_input(tree.tokens, np.int32), as_input(tree.parents, np.int16)
            with self._drafter.lock:
                self._befores[slot] = learn(self._drafter.cells, last, new, tokens, parents, rows)
        self._lasts[slot] = new[-1]


def _candidates(candidates: NDArray[Any], count: int | None = None) -> NDArray[np.int32]:
    """Return candidates, one row for each of `count` tokens, in the form that the kernels expect."""
    rows = np.asarray(candidates)
    if rows.ndim != 2 or rows.dtype.kind not in "iu" or count not in (None, len(rows)):
        raise DraftstoreError(
            f"candidates must be int32 [{count or 'any'}, {WIDTH}], found an array of shape {rows.shape} and type "
            f"{rows.dtype}"
        )
    return as_input(rows, np.int32)
