"""The texts in the rows of an engine's batch, identified by their token ids alone.

An engine that provides no request ids moves requests between the rows of its batch, swaps them, removes them and brings
them back. A text is identified by its previous ids: a row continues the text whose ids precede the row's new ones.
Texts with equal ids are also equal to a drafter, so they may be swapped, but no two rows ever get the same text.

A text that stays in its row costs the same however long it is: its last ids are compared, and a few of those before.
Whole texts are compared if another one has the same length and these ids, and for rows whose text was elsewhere.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.slots import enlarged
from draftstore.engines.texts import SIZE, Texts, ids_of
from draftstore.errors import EngineError
from draftstore.jit import as_input, kernel, leaf_kernel

TAIL, SAMPLES = 64, 8
"""Number of last ids, and of others, that are compared of a text that stays in its row."""
Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


class Rows:
    """Finds the text of every row by comparing ids."""

    def __init__(self, texts: Texts, start: Callable[[NDArray[np.int32]], int]) -> None:
        """Search `texts`, which others extend and forget; `start` starts a new one and returns its slot."""
        self._texts, self._start = texts, start
        self._there: NDArray[np.int64] = np.empty(0, np.int64)

    def find(self, table: NDArray[np.int32], sizes: NDArray[np.int32], counts: NDArray[np.int64]) -> Found:
        """Find the text of each row with new ids, or start it.

        Args:
            table: int32 [at least rows, any], the ids in every row.
            sizes: int32 [at least rows], number of ids of each text.
            counts: int64 [rows], number of new ones at its end.

        Returns:
            These rows, int64 [any], and for each: number of ids, int64 [any]; slot of its text, int64 [any]. Then the
            new ids of texts that were known, int32 [any], and the end of each text's, int64 [any].
        """
        self._there = enlarged(self._there, len(counts), fill=-1)
        table, sizes = as_input(table, np.int32), as_input(sizes, np.int32)
        found: Found = _find(self._texts.state, self._there, table, sizes, counts)
        rows, lengths, slots, *_ = found
        for place in np.flatnonzero(slots < 0).tolist():
            if lengths[place] < 0:
                raise EngineError("a row ends outside the table of ids")
            slots[place] = self._there[rows[place]] = self._start(table[rows[place], : lengths[place]])
        return found


@kernel
def _find(state, there, table, lengths, added):
    """Return `Rows.find`'s result with slots of -1, number of ids -1 if a row ends outside; set who is `there`."""
    rows = np.flatnonzero(added)
    batch, taken = len(rows), np.zeros(state.shape[1], np.bool_)
    sizes, befores, stops = np.full(batch, -1, np.int64), np.empty(batch, np.int64), np.empty(batch, np.int64)
    found = np.full(batch, -1, np.int64)
    for place in range(batch):
        row, size = rows[place], np.int64(-1)
        if row < min(len(lengths), len(table)):
            size = np.int64(lengths[row])
        if added[row] <= size <= table.shape[1]:
            sizes[place] = size
        slot, before = there[row], sizes[place] - added[row]
        befores[place] = before
        if slot >= 0 and before >= 0 and state[SIZE, slot] == before and not taken[slot]:
            first = np.int64(0) if _has_twin(state, slot) else before - TAIL
            if _agree(ids_of(state, slot), table[row], first, before):
                found[place], taken[slot] = slot, True
    there[:] = -1
    end = np.int64(0)
    for place in range(batch):
        for slot in range(state.shape[1] if found[place] < 0 <= befores[place] else 0):
            same = state[SIZE, slot] == befores[place] and not taken[slot]
            if same and _agree(ids_of(state, slot), table[rows[place]], np.int64(0), befores[place]):
                found[place], taken[slot] = slot, True
                break
        there[rows[place]] = found[place]
        end += added[rows[place]] if found[place] >= 0 else 0
        stops[place] = end
    new = np.empty(end, np.int32)
    for place in range(batch):
        if found[place] >= 0:
            count, row = sizes[place] - befores[place], table[rows[place]]
            new[stops[place] - count : stops[place]] = row[befores[place] : sizes[place]]
    return rows, sizes, found, new, stops


@kernel
def _has_twin(state, slot):
    """Return whether another text has the same size and the same ids at the places that are compared."""
    ids, size = ids_of(state, slot), state[SIZE, slot]
    for other in range(state.shape[1]):
        if (
            state[SIZE, other] == size
            and other != slot
            and _agree(ids, ids_of(state, other), size - TAIL, size)
        ):
            return True
    return False


@leaf_kernel
def _agree(text, row, first, stop):
    """Return whether a text has the ids of a row from `first` to `stop`, and at some places before."""
    for place in range(stop - 1, max(first, 0) - 1, -1):
        if text[place] != row[place]:
            return False
    for sample in range(SAMPLES if first > 0 else 0):
        if text[first * sample // SAMPLES] != row[first * sample // SAMPLES]:
            return False
    return True
