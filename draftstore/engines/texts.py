"""The texts of an engine's requests, by slot, each in an array of its own: one that grows copies no other."""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from draftstore.drafting.drafter import SEPARATOR
from draftstore.drafting.slots import enlarged
from draftstore.jit import kernel, leaf_kernel, pointer
from draftstore.trees.tree import best_chains
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
    stops: Any, budgets: Any,
) -> Any:  # fmt: skip
    """Append new ids to texts, and count what they accepted of their last drafts; do nothing if a text lacks room.

    Args:
        state: see `Texts.state`.
        tokens: int32 [slots, any], the last draft of each text; parents int16 likewise; nodes int32 [slots], set to 0.
        counts: see `DraftFigures.steps`.
        vocab_size: limit of ids in drafts.
        step: number of this step.
        slots: int64 [batch], the texts.
        ids: int32 [any], the new ids of all texts; `stops` int64 [batch], the end of each text's.
        budgets: int64 [batch], set to 0 where a text has no drafts.

    Returns:
        Whether all texts have room; those with new ids and drafts, int64 [any]; these ids, `separated`, int32 [any];
        the end of each text's; the texts that were last in the step before the last, int64 [any].
    """
    learning, ends = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64)
    known = np.empty(len(ids), np.int32)
    texts, end, start = 0, 0, np.int64(0)
    for place in range(len(slots)):
        if state[SIZE, slots[place]] + stops[place] - start > state[ROOM, slots[place]]:
            return False, learning[:0], known[:0], ends[:0], learning[:0]
        start = stops[place]
    start = np.int64(0)
    for place in range(len(slots)):
        slot, new = slots[place], ids[start : stops[place]]
        start = stops[place]
        state[STEP, slot] = step
        append_ids(state, slot, new)
        if state[DRAFTS, slot] <= 0:
            budgets[place] = 0
        elif len(new) > 0:
            for token in new:
                known[end] = token if 0 <= token < vocab_size else SEPARATOR
                end += 1
            learning[texts], ends[texts] = slot, end
            texts += 1
            size = nodes[slot]
            accepted = walk(tokens[slot, :size], parents[slot, :size], new, _pass_by, 0)
            accepted = min(
                accepted, len(new) - 1
            )  # the last id is the model's own, even if the draft had it too
            row = counts[state[CORPUS, slot]]
            row[0] += 1
            row[1] += size
            row[2] += accepted
            row[3 : 3 + accepted] += 1
        nodes[slot] = 0
    waiting = np.flatnonzero((state[STEP] == step - 2) & (state[SIZE] >= 0))
    return True, learning[:texts], known[:end], ends[:texts], waiting


@leaf_kernel
def _pass_by(_state: Any, _node: Any, _child: Any) -> None:
    pass


@kernel
def keep_drafts(
    kept: Any, above: Any, nodes: Any, slots: Any, tokens: Any, parents: Any, levels: Any, sizes: Any, budgets: Any,
    chain: Any,
) -> Any:  # fmt: skip
    """Cut the drafts of texts to budgets, and to their best chains of at most `chain` nodes unless that is negative.

    Args:
        kept: int32 [slots, any], set to the drafts; above int16 likewise, parents; nodes int32 [slots], sizes.
        slots: int64 [batch], the texts.
        tokens: int32 [batch, any], read-only like all that follow; parents int16, levels uint8 likewise.
        sizes: int32 [batch], nodes of each draft; budgets int64 [batch], maximum nodes.

    Returns:
        The first four arrays of a `DraftBatch`.
    """
    cut = np.empty(len(slots), np.int32)
    for place in range(len(slots)):
        cut[place] = max(np.int64(0), min(np.int64(sizes[place]), budgets[place]))
    if chain >= 0:
        tokens, parents, levels, cut = best_chains(tokens, parents, levels, cut, chain)
    else:
        tokens, parents, levels = tokens.copy(), parents.copy(), levels.copy()
    for place in range(len(slots)):
        size = cut[place]
        kept[slots[place], :size], above[slots[place], :size] = tokens[place, :size], parents[place, :size]
        nodes[slots[place]] = size
    return tokens, parents, levels, cut


@kernel
def find_texts(state: Any, there: Any, table: Any, lengths: Any, added: Any) -> Any:
    """Find the text that every row of a batch continues: that with the ids before its new ones.

    Args:
        state: see `Texts.state`.
        there: int64 [any], the text that was in each row, or -1; set to that which is.
        table: int32 [any, any], the ids in each row.
        lengths: int32 [any], number of ids in each row.
        added: int64 [batch], number of new ones at its end; rows without any are passed by.

    Returns:
        The rows with new ids, int64 [any], and for each: number of ids, int64 [any]; slot of its text, no slot twice,
        or -1; slot of another text that was in this row and begins the row's, or -1. Then the new ids of texts that
        were found, int32 [any], and the end of each text's. The rows are -1 if one ends outside the table.
    """
    rows = np.flatnonzero(added)
    batch = len(rows)
    sizes, befores, stops = np.empty(batch, np.int64), np.empty(batch, np.int64), np.empty(batch, np.int64)
    found, begun = np.full(batch, -1, np.int64), np.full(batch, -1, np.int64)
    taken = np.zeros(state.shape[1], np.bool_)
    end = np.int64(0)
    for place in range(batch):
        row = rows[place]
        size = np.int64(lengths[row]) if row < min(len(lengths), len(table)) else np.int64(-1)
        if not added[row] <= size <= table.shape[1]:
            return np.full(batch, -1, np.int64), sizes, found, begun, table[0, :0].copy(), stops
        sizes[place], befores[place], slot = size, size - added[row], there[row]
        if slot >= 0 and state[SIZE, slot] == befores[place] and not taken[slot]:
            first = np.int64(0) if _has_twin(state, slot) else befores[place] - TAIL
            if _agree(_ids_of(state, slot), table[row], first, befores[place]):
                found[place], taken[slot] = slot, True
    for place in range(batch):
        for slot in range(state.shape[1] if found[place] < 0 else 0):
            if state[SIZE, slot] == befores[place] and not taken[slot]:
                if _agree(_ids_of(state, slot), table[rows[place]], np.int64(0), befores[place]):
                    found[place], taken[slot] = slot, True
                    break
    for place in range(batch):
        slot = there[rows[place]]
        if found[place] >= 0:
            end += added[rows[place]]
        elif slot >= 0 and not taken[slot] and 0 <= state[SIZE, slot] < befores[place]:
            if _agree(_ids_of(state, slot), table[rows[place]], np.int64(0), state[SIZE, slot]):
                begun[place], taken[slot] = slot, True
        stops[place] = end
    new = np.empty(end, np.int32)
    there[:] = -1
    for place in range(batch):
        there[rows[place]] = found[place]
        if found[place] >= 0:
            new[stops[place] - added[rows[place]] : stops[place]] = table[
                rows[place], befores[place] : sizes[place]
            ]
    return rows, sizes, found, begun, new, stops


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
