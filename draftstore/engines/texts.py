"""The texts of an engine's requests, by slot, each in an array of its own: one that grows copies no other.

An engine that provides no request ids moves requests between the rows of its batch, swaps them, removes them and brings
them back. There a text is identified by its previous ids: a row continues the text whose ids precede the row's new
ones. Texts with equal ids are also equal to a drafter, so they may be swapped, but no two rows ever get the same text.

A text that stays in its row costs the same however long it is: its last ids are compared, and a few of those before.
Whole texts are compared if another one has the same length and these ids, and for rows whose text was elsewhere.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from draftstore.decoding.budget import BANDS, FORGETTING, PRIOR, chance_of, count_claims
from draftstore.drafting.drafter import SEPARATOR
from draftstore.drafting.slots import enlarged
from draftstore.errors import EngineError
from draftstore.jit import as_input, kernel, leaf_kernel, pointer
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import best_chains, walk

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""
ADDRESS, ROOM, SIZE, REMEMBERED, STEP, CORPUS, DRAFTS, PROMPT = range(8)
"""Rows of `Texts.state`: address and capacity of a text's array; number of its ids, -1 in a free slot; number of those
in the prompt or already in the live store; last step; number of the corpus; 1 if it has drafts; ids of the prompt."""
LONG_MEMORY = 1 / 8
"""How fast results of all texts are forgotten, by those of one text."""
TAIL, SAMPLES = 64, 8
"""Number of last ids, and of others, that are compared of a text that stays in its row."""
Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


class Texts:
    """Texts and their last drafts, by slot.

    Attributes:
        state: int64 [8, slots], see `ADDRESS`.
    """

    def __init__(self, nodes: int = 0, *, judged: bool = False) -> None:
        """Start without texts, for drafts of at most `nodes` nodes; `judged` drafts have `chances`."""
        self.state: NDArray[np.int64] = np.empty((PROMPT + 1, 0), np.int64)
        self._arrays: dict[int, NDArray[np.int32]] = {}
        self._drafts: tuple[NDArray[Any], ...] = (
            np.empty((0, nodes), np.int32), np.empty((0, nodes), np.int16), np.empty((0, nodes), np.uint8)
        )  # fmt: skip
        self._sizes = np.empty((2, 0), np.int32)  # drafted, and verified
        self._seen, self._all = np.empty((0, 2, BANDS)), np.zeros((2, BANDS))
        self._judged = judged

    def __len__(self) -> int:
        return len(self._arrays)

    def ids(self, slot: int) -> NDArray[np.int32]:
        """Return a text, int32 [any]: a view, which is stable as long as the text only grows."""
        return self._arrays[slot][: self.state[SIZE, slot]]

    def put(self, slot: int, ids: NDArray[np.int32]) -> None:
        """Start a text in a free slot."""
        slots = slot + 1 + slot // 2
        self.state = enlarged(self.state, PROMPT + 1, slots, fill=-1)
        self._drafts = tuple(enlarged(each, slots) for each in self._drafts)
        self._sizes, self._seen = enlarged(self._sizes, 2, slots), enlarged(self._seen, slots)
        self.state[:, slot], self._sizes[:, slot], self._seen[slot], self._arrays[slot] = 0, 0, 0, ids[:0]
        self._reserve(slot, len(ids))
        _append(self.state, slot, as_input(ids, np.int32))

    def drop(self, slot: int) -> None:
        """Free a slot."""
        del self._arrays[slot]
        self.state[:, slot] = -1

    def follow(
        self, slots: NDArray[np.int64], ids: NDArray[np.int32], stops: NDArray[np.int64], budgets: NDArray[np.int64],
        step: int, vocab_size: int, counts: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], bool]:  # fmt: skip
        """Append the new ids of a step to texts, and count what they accepted of their last drafts.

        The arguments are those of `Proposer.propose`, whose budgets are set to 0 where a text has no drafts; the number
        of the step; the limit of ids in drafts; and `DraftFigures.steps`.

        Returns:
            The texts with new ids and drafts, int64 [any]; these ids, `separated`; the end of each text's ids; the
            texts whose last step was the one before the last, int64 [any]; whether the new ids of every text are what
            one pass yields.
        """
        drafts, new = (*self._drafts, self._sizes, self._seen, self._all), (slots, ids, stops, budgets)
        while True:
            place, *found = _follow(self.state, *drafts, self._judged, *new, step, vocab_size, counts)
            if place < 0:
                return tuple(found)
            self._reserve(int(slots[place]), int(stops[place] - (stops[place - 1] if place else 0)))

    def keep(
        self, slots: NDArray[np.int64], batch: DraftBatch, budgets: NDArray[np.int64], chain: int
    ) -> DraftBatch:
        """Return drafts, cut to budgets and to their best chains of at most `chain` nodes; -1: trees."""
        return DraftBatch.plain(*_keep(
            *self._drafts, self._sizes, slots, as_input(batch.tokens, np.int32),
            as_input(batch.parents, np.int16), as_input(batch.levels, np.uint8), as_input(batch.sizes, np.int32),
            budgets, chain,
        ))  # fmt: skip

    def chances(self, slots: NDArray[np.int64], batch: DraftBatch) -> NDArray[np.float64]:
        """Return float64 [batch, nodes], the chance of each node, at most that of any before it; 0 behind a draft."""
        parents, levels = as_input(batch.parents, np.int16), as_input(batch.levels, np.uint8)
        found: NDArray[np.float64] = _chances(
            self._seen, self._all, PRIOR, slots, parents, levels, as_input(batch.sizes, np.int32)
        )
        return found

    def verify(self, slots: NDArray[np.int64], sizes: NDArray[np.int32]) -> None:
        """Note that only so many nodes of each draft are verified."""
        self._sizes[1, slots] = sizes

    def _reserve(self, slot: int, new: int) -> None:
        ids = self.ids(slot)
        size = len(ids) + new
        room = self._arrays[slot] = np.empty(size + size // 4 + SPARE, np.int32)
        room[: len(ids)] = ids
        self.state[ADDRESS, slot], self.state[ROOM, slot] = room.ctypes.data, len(room)


@kernel
def ids_of(state, slot):
    """Return the array of a text; see `Texts.state`."""
    return carray(pointer(state[ADDRESS, slot]), (state[ROOM, slot],), np.int32)


@kernel
def _append(state, slot, new):
    size = state[SIZE, slot] + len(new)
    ids_of(state, slot)[state[SIZE, slot] : size] = new
    state[SIZE, slot] = size


@kernel
def _follow(
    state, tokens, parents, levels, sizes, seen, everything, judged, slots, ids, stops, budgets, step, vocab_size,
    counts,
):  # fmt: skip
    """Return the first place of a text without room, before anything has changed, or -1 and `Texts.follow`'s result."""
    learning, ends, known = np.empty(len(slots), np.int64), np.empty(len(slots), np.int64), np.empty_like(ids)
    texts, end, start, regular = 0, 0, np.int64(0), True
    for place in range(len(slots)):
        if state[SIZE, slots[place]] + stops[place] - start > state[ROOM, slots[place]]:
            return place, learning, known, ends, learning, True
        start = stops[place]
    start = np.int64(0)
    for place in range(len(slots)):
        slot, new = slots[place], ids[start : stops[place]]
        start = stops[place]
        state[STEP, slot] = step
        _append(state, slot, new)
        if state[DRAFTS, slot] <= 0:
            budgets[place] = 0
        elif len(new) > 0:
            for token in new:
                known[end] = token if 0 <= token < vocab_size else SEPARATOR
                end += 1
            learning[texts], ends[texts] = slot, end
            texts += 1
            size, row = sizes[1, slot], counts[state[CORPUS, slot]]
            accepted = walk(tokens[slot, :size], parents[slot, :size], new, _pass_by, 0)
            # The last id is the model's own, even if the draft had it too.
            accepted = min(accepted, len(new) - 1)
            regular = regular and accepted == len(new) - 1
            if judged:
                draft, claims = slice(0, sizes[0, slot]), np.zeros((2, BANDS))
                state_of = parents[slot, draft], levels[slot, draft], claims
                walk(tokens[slot, draft], parents[slot, draft], new, count_claims, state_of)
                for total, kept in (
                    (seen[slot], FORGETTING ** len(new)),
                    (everything, FORGETTING ** (LONG_MEMORY * len(new))),
                ):
                    total += claims
                    total *= kept
            row[0] += 1
            row[1] += size
            row[2] += accepted
            row[3 : 3 + accepted] += 1
        sizes[:, slot] = 0
    waiting = np.flatnonzero((state[STEP] == step - 2) & (state[SIZE] >= 0))
    return -1, learning[:texts], known[:end], ends[:texts], waiting, regular


@leaf_kernel
def _pass_by(_state, _node, _child):
    pass


@kernel
def _keep(kept, above, claims, nodes, slots, tokens, parents, levels, sizes, budgets, chain):
    """Return the first four arrays of a `DraftBatch`."""
    cut = np.empty(len(slots), np.int32)
    for place in range(len(slots)):
        cut[place] = max(np.int64(0), min(np.int64(sizes[place]), budgets[place]))
    if chain >= 0:
        tokens, parents, levels, cut = best_chains(tokens, parents, levels, cut, chain)
    else:
        tokens, parents, levels = tokens.copy(), parents.copy(), levels.copy()
    for place in range(len(slots)):
        slot, size = slots[place], cut[place]
        kept[slot, :size], above[slot, :size] = tokens[place, :size], parents[place, :size]
        claims[slot, :size], nodes[:, slot] = levels[place, :size], size
    return tokens, parents, levels, cut


@kernel
def _chances(seen, everything, prior, slots, parents, levels, sizes):
    """Return `Texts.chances`. The prior of a text is that drafts come true as often as in all texts lately."""
    chances, factors = np.zeros(parents.shape), np.empty(BANDS)
    for text in range(len(slots)):
        for band in range(BANDS):
            usual = (everything[1, band] + prior[1, 0]) / (everything[0, band] + prior[0, 0])
            expected, actual = seen[slots[text], :, band]
            factors[band] = (actual + prior[0, 0] * usual) / (expected + prior[0, 0])
        for node in range(sizes[text]):
            chances[text, node] = chance_of(parents[text], levels[text], factors, chances[text], node)
        for node in range(1, sizes[text]):
            chances[text, node] = min(chances[text, node], chances[text, node - 1])
    return chances


class Rows:
    """Finds the text of every row of an engine's batch by comparing ids."""

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
