"""The texts of an engine's requests, by slot, each in an array of its own: one that grows copies no other."""

from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from draftstore.drafting.drafter import SEPARATOR
from draftstore.drafting.slots import enlarged
from draftstore.jit import kernel, leaf_kernel, pointer
from draftstore.trees.walk import walk

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""
TAIL, SAMPLES = 64, 8
"""Number of last ids, and of others, that are compared of a text that stays in its row of an engine's batch."""
ADDRESS, ROOM, SIZE, KEY, REMEMBERED, STEP, CORPUS, DRAFTS = range(8)
"""Rows of `Texts.state`: address and capacity of a text's array; number of its ids, -1 in a free slot; hash of the last
`TAIL`; number of those in the prompt or already in the live store; last step; number of the corpus; 1 if it has drafts.
"""
_FACTOR = 0x1E3779B97F4A7C15
_LEAVING = (pow(_FACTOR, TAIL, 1 << 64) + (1 << 63)) % (1 << 64) - (1 << 63)


class Texts:
    """Texts by slot.

    Attributes:
        state: int64 [8, slots], see `ADDRESS`.
    """

    def __init__(self) -> None:
        """Start without texts."""
        self.state: NDArray[np.int64] = np.empty((DRAFTS + 1, 0), np.int64)
        self._arrays: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._arrays)

    def ids(self, slot: int) -> NDArray[np.int32]:
        """Return a text, int32 [any]: a view, which is stable as long as the text only grows."""
        return self._arrays[slot][: self.state[SIZE, slot]]

    def put(self, slot: int, ids: NDArray[np.int32]) -> None:
        """Start a text, read-only, in a free slot."""
        self.state = enlarged(self.state, DRAFTS + 1, slot + 1 + slot // 2, fill=-1)
        self.state[:, slot], self._arrays[slot] = 0, ids[:0]
        self.reserve(np.array([slot]), np.array([len(ids)]))
        append_ids(self.state, slot, ids)

    def reserve(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Make room for numbers of new ids of texts."""
        sizes = self.state[SIZE, slots] + counts
        for place in np.flatnonzero(sizes > self.state[ROOM, slots]).tolist():
            slot, size = int(slots[place]), int(sizes[place])
            room, ids = np.empty(size + size // 4 + SPARE, np.int32), self.ids(slot)
            room[: len(ids)] = ids
            self._arrays[slot] = room
            self.state[ADDRESS, slot], self.state[ROOM, slot] = room.ctypes.data, len(room)

    def drop(self, slot: int) -> None:
        """Free a slot."""
        del self._arrays[slot]
        self.state[:, slot] = -1


@kernel
def _ids_of(state: Any, slot: Any) -> Any:
    return carray(pointer(state[ADDRESS, slot]), (state[ROOM, slot],), np.int32)


@kernel
def append_ids(state: Any, slot: Any, new: Any) -> None:
    """Append new ids to a text that has room for them; see `Texts.state`."""
    ids, size, key = _ids_of(state, slot), state[SIZE, slot], state[KEY, slot]
    for token in new:
        key = key * _FACTOR + token
        if size >= TAIL:
            key -= ids[size - TAIL] * _LEAVING
        ids[size] = token
        size += 1
    state[SIZE, slot], state[KEY, slot] = size, key


@kernel
def follow_texts(
    state: Any, tokens: Any, parents: Any, nodes: Any, counts: Any, vocab_size: Any, step: Any, slots: Any, ids: Any,
    stops: Any,
) -> Any:  # fmt: skip
    """Append new ids to texts that have room for them, and count what they accepted of their last drafts.

    Args:
        state: see `Texts.state`.
        tokens: int32 [slots, any], the last draft of each text; parents int16 likewise; nodes int32 [slots], set to 0.
        counts: see `DraftFigures.steps`.
        vocab_size: limit of ids in drafts.
        step: number of this step.
        slots: int64 [batch], the texts.
        ids: int32 [any], the new ids of all texts; `stops` int64 [batch], the end of each text's.

    Returns:
        The texts with new ids and drafts, int64 [any]; these ids, `separated`, int32 [any]; the end of each text's.
    """
    learning, ends = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    known = np.empty(len(ids), np.int32)
    texts, end, start = 0, 0, np.int64(0)
    for place in range(len(slots)):
        slot, new = slots[place], ids[start : stops[place]]
        start = stops[place]
        state[STEP, slot] = step
        append_ids(state, slot, new)
        if len(new) > 0 and state[DRAFTS, slot] > 0:
            for token in new:
                known[end] = token if 0 <= token < vocab_size else SEPARATOR
                end += 1
            learning[texts], ends[texts] = slot, end
            texts += 1
            size = nodes[slot]
            accepted = walk(tokens[slot, :size], parents[slot, :size], new, _pass_by, 0)
            accepted = min(accepted, len(new) - 1)  # the last id is the model's own, even if the draft had it too
            row = counts[state[CORPUS, slot]]
            row[0] += 1
            row[1] += size
            row[2] += accepted
            row[3 : 3 + accepted] += 1
        nodes[slot] = 0
    return learning[:texts], known[:end], ends[:texts]


@leaf_kernel
def _pass_by(_state: Any, _node: Any, _child: Any) -> None:
    pass


@kernel
def find_texts(state: Any, there: Any, table: Any, rows: Any, sizes: Any, counts: Any) -> Any:
    """Find the text that every row of a batch continues: that with the ids before its new ones.

    Args:
        state: see `Texts.state`.
        there: int64 [any], the text that was in each row, or -1.
        table: int32 [any, any], the ids in each row.
        rows: int64 [batch], the rows with new ids; `sizes` and `counts` int64 [batch], number of all their ids and of
            the new ones.

    Returns:
        The slot of each text, no slot twice, or -1, int64 [batch]; the slot of another text that was in this row and
        begins the row's, or -1, int64 [batch]; the new ids of texts that were found, int32 [any]; the end of each
        text's, int64 [batch].
    """
    batch = len(rows)
    found, begun, stops = np.full(batch, -1, np.int64), np.full(batch, -1, np.int64), np.empty(batch, np.int64)
    taken = np.zeros(state.shape[1], np.bool_)
    for place in range(batch):
        slot, before = there[rows[place]], sizes[place] - counts[place]
        if slot >= 0 and state[SIZE, slot] == before and not taken[slot]:
            first = np.int64(0) if _has_twin(state, slot) else before - TAIL
            if _agree(_ids_of(state, slot), table[rows[place]], first, before):
                found[place], taken[slot] = slot, True
    for place in range(batch):
        before = sizes[place] - counts[place]
        if found[place] < 0:
            for slot in range(state.shape[1]):
                if state[SIZE, slot] == before and not taken[slot]:
                    if _agree(_ids_of(state, slot), table[rows[place]], np.int64(0), before):
                        found[place], taken[slot] = slot, True
                        break
    end = np.int64(0)
    for place in range(batch):
        slot, size = there[rows[place]], sizes[place]
        if found[place] >= 0:
            end += counts[place]
        elif slot >= 0 and not taken[slot] and 0 <= state[SIZE, slot] < size - counts[place]:
            if _agree(_ids_of(state, slot), table[rows[place]], np.int64(0), state[SIZE, slot]):
                begun[place], taken[slot] = slot, True
        stops[place] = end
    new = np.empty(end, np.int32)
    for place in range(batch):
        if found[place] >= 0:
            new[stops[place] - counts[place] : stops[place]] = table[
                rows[place], sizes[place] - counts[place] : sizes[place]
            ]
    return found, begun, new, stops


@leaf_kernel
def _has_twin(state: Any, slot: Any) -> Any:
    """Return whether another text has the same size and end."""
    same = 0
    for other in range(state.shape[1]):
        same += state[KEY, other] == state[KEY, slot] and state[SIZE, other] == state[SIZE, slot]
    return same > 1


@leaf_kernel
def _agree(text: Any, row: Any, first: Any, stop: Any) -> Any:
    """Return whether a text has the ids of a row from `first` to `stop`, and, spread over those before, some more."""
    for place in range(stop - 1, max(first, 0) - 1, -1):
        if text[place] != row[place]:
            return False
    for sample in range(SAMPLES if first > 0 else 0):
        place = first * sample // SAMPLES
        if text[place] != row[place]:
            return False
    return True
