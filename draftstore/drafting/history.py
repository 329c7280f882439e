"""Kernels for growing texts: an index of the n-grams of a text, and the draft tree of their continuations.

Each n-gram length in `LENGTHS` has a hash table, whose cells start linked lists of positions in the text, latest first.
N-grams are read from the text itself, which distinguishes those that share a cell.

The text lies in a ring buffer: once that is full, a new token replaces the oldest, and lists end where the text begins.
A negative token separates documents: no n-gram spans it.
"""

from typing import NamedTuple

import numpy as np
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from draftstore.errors import require_limits
from draftstore.jit import kernel, leaf_kernel, pointer
from draftstore.search.candidates import clear_table, new_candidates, place_of
from draftstore.search.expand import LIMITS, enter_all, floor_of, load_path
from draftstore.trees.frontier import MAX_DEPTH, grow, new_frontier, unpack_nodes

LENGTHS = (1, 2, 4, 8)
"""Lengths of the indexed n-grams; longer matches are found among the occurrences of the longest."""
MAX_ROWS = 4096
STEPS = 4
"""Maximum positions to read in a list, as a multiple of the occurrences wanted: other n-grams share its cell."""
CAPACITY, CELLS, SIZE = 3, 4, 5
"""Columns of a table of histories, after the addresses of the arrays."""
_SCATTER = 0x1E3779B97F4A7C15
_SHIFTS = tuple(int(np.uint64(pow(_SCATTER, length // 2, 1 << 64)).astype(np.int64)) for length in LENGTHS)
"""Factors of the key of an n-gram's second half, as int64, by order: powers of `_SCATTER`, see `_mix`."""


class HistoryRule(NamedTuple):
    """Parameters of drafts from the text, see `draftstore.search.expand.Rule`; docs/team/findings.md says why these.

    Attributes:
        rows: maximum occurrences read of each indexed n-gram, latest first.
        alpha: pseudo-count of occurrences that a suffix yields to shorter ones, divided by the square of its length:
            a long match is trusted with few occurrences.
        doubt: probability that the continuation of a node differs from all occurrences, however many agree. Without
            it, long copies get twice the correct probability, since the text does not show where they end.
    """

    max_match: int = 32
    depth: int = MAX_DEPTH
    rows: int = 32
    floor: float = 0.01
    alpha: float = 0.0
    beta: float = 2.0
    doubt: float = 0.02

    def check(self) -> None:
        """Raise a DraftstoreError for invalid values."""
        limits = LIMITS | {"rows": (1, MAX_ROWS), "doubt": (0, 1)}
        require_limits(
            "a rule for growing texts",
            {name: (value, *limits[name]) for name, value in self._asdict().items()},
        )


class History(NamedTuple):
    """A text in a ring buffer, and an index of its n-grams; the place of an n-gram is that of its last token.

    Attributes:
        tokens: int32 [capacity], token i of the text at place i modulo the capacity.
        links: int32 [len(LENGTHS), capacity], steps back to the previous n-gram in the same list; 0: none.
        heads: int32 [len(LENGTHS), power of two], place of the latest n-gram with this hash; -1: none.
    """

    tokens: NDArray[np.int32]
    links: NDArray[np.int32]
    heads: NDArray[np.int32]

    @classmethod
    def new(cls, capacity: int) -> "History":
        """Return an empty history for `capacity` tokens, which takes 36 to 52 bytes per token."""
        lists, cells = len(LENGTHS), 1 << (capacity - 1).bit_length()
        return cls(
            np.empty(capacity, np.int32), np.empty((lists, capacity), np.int32), np.full((lists, cells), -1, np.int32)
        )  # fmt: skip

    def row(self) -> tuple[int, ...]:
        """Return the row of an empty history in a table of histories: addresses, capacity, cells, size."""
        return *(array.ctypes.data for array in self), len(self.tokens), self.heads.shape[1], 0


class _Scratch(NamedTuple):
    """Buffers for the current node."""

    text: NDArray[np.int64]  # [max_match + depth], the last tokens of the text, followed by the path
    firsts: NDArray[
        np.int64
    ]  # [len(LENGTHS)], where the lists begin, in steps back from the last token; -1: none
    counts: NDArray[np.int64]  # [max_match + 1], occurrences read, by match length
    kinds: NDArray[np.int64]  # [max_match + 1], candidates, by length of their longest match
    shares: NDArray[np.float64]  # [max_match + 1], share of an occurrence, by match length
    places: NDArray[np.int64]  # [room], candidate of each occurrence read
    lengths: NDArray[np.int64]  # [room], its match length
    match: NDArray[np.int64]  # [2], longest match of the context, and its occurrences


@kernel
def append_tokens(tokens, links, heads, size, ids):
    """Append ids to a `History` of `size` tokens so far; return its new size."""
    capacity, mask, stop = len(tokens), heads.shape[1] - 1, size + len(ids)
    keys = np.empty((len(LENGTHS), LENGTHS[-1]), np.int64)  # of the n-grams that end at the last places
    first = max(0, size - LENGTHS[-1] + 1, size - capacity)
    place, run = first % capacity, 0
    for at in range(first, stop):
        if at >= size:
            tokens[place] = ids[at - size]
            for order in range(len(LENGTHS)):
                links[order, place] = 0
        token, key = np.int64(tokens[place]), np.int64(0)
        run = min(run + 1, capacity) if token >= 0 else 0
        for order in range(len(LENGTHS)):
            if run < LENGTHS[order]:
                break
            if order == 0:
                key = _mix(key, token)
            else:  # from those of its halves
                key = key * _SHIFTS[order] + keys[order - 1, (at - LENGTHS[order - 1]) % LENGTHS[-1]]
            keys[order, at % LENGTHS[-1]] = key
            if at >= size:
                cell = _cell_of(key, mask)
                head = np.int64(heads[order, cell])
                links[order, place] = _back(capacity, place, head) if head >= 0 else 0
                heads[order, cell] = place
        place = place + 1 if place + 1 < capacity else 0
    return stop


@kernel
def append_texts(table, texts, places, slots, ids, stops):
    """Append new ids to the histories of a table, see `History.row`; return the first text that lacks room, or the end.

    Args:
        table: int64 [slots, 6].
        texts: index of the first of `places` to append to.
        places: int64 [any], the texts among `slots`, int64 [batch].
        ids: int32 [any], the new ids of all texts; `stops` int64 [batch], the end of each text's.
    """
    for text in range(texts, len(places)):
        place = places[text]
        slot, new = slots[place], ids[(stops[place - 1] if place > 0 else 0) : stops[place]]
        size = table[slot, SIZE]
        if size + len(new) > table[slot, CAPACITY]:
            return text
        tokens, links, heads = _history_of(table, slot)
        table[slot, SIZE] = append_tokens(tokens, links, heads, size, new)
    return len(places)


@kernel
def draft_texts(table, texts, contexts, packed_rule, budget, max_level):
    """Grow draft trees from histories of a table, see `History.row`, by a HistoryRule as float64 [7].

    Args:
        table: int64 [any, 6].
        texts: int64 [batch], rows of the table.
        contexts: int32 [batch, any], what each draft follows; a negative id hides those before it. Without rows, it is
            the history itself.

    Returns:
        tokens int32 [batch, budget], parents int16 [batch, budget], levels uint8 [batch, budget]; sizes and lengths of
        the longest matches, both int32 [batch]; occurrences read of these, int64 [batch].
    """
    rule, batch = _unpack_rule(packed_rule), len(texts)
    tokens, parents = np.empty((batch, budget), np.int32), np.empty((batch, budget), np.int16)
    levels, sizes = np.empty((batch, budget), np.uint8), np.empty(batch, np.int32)
    matches, counts = np.empty(batch, np.int32), np.empty(batch, np.int64)
    room = len(LENGTHS) * rule.rows
    scratch = _Scratch(
        np.empty(rule.max_match + rule.depth, np.int64), np.empty(len(LENGTHS), np.int64),
        np.empty(rule.max_match + 1, np.int64), np.empty(rule.max_match + 1, np.int64),
        np.empty(rule.max_match + 1, np.float64), np.empty(room, np.int64), np.empty(room, np.int64),
        np.zeros(2, np.int64),
    )  # fmt: skip
    candidates, nodes = new_candidates(room), new_frontier(budget)
    for row in range(batch):
        size, end = table[texts[row], SIZE], 0
        history = (*_history_of(table, texts[row]), size)
        length = contexts.shape[1] if len(contexts) > 0 else size
        for place in range(max(0, length - rule.max_match), length):
            token = contexts[row, place] if len(contexts) > 0 else history[0][place % len(history[0])]
            scratch.text[end] = token
            end = end + 1 if token >= 0 else 0
        scratch.match[:] = 0
        state = history, rule, scratch, candidates, end
        sizes[row] = grow(nodes, rule.depth, _enter_following, state, max_level)
        unpack_nodes(nodes, sizes[row], tokens[row], parents[row], levels[row])
        matches[row], counts[row] = scratch.match
    return tokens, parents, levels, sizes, matches, counts


@kernel
def _history_of(table, slot):
    """Return the arrays of a text's `History`."""
    capacity = table[slot, CAPACITY]
    return (
        carray(pointer(table[slot, 0]), (capacity,), np.int32),
        carray(pointer(table[slot, 1]), (len(LENGTHS), capacity), np.int32),
        carray(pointer(table[slot, 2]), (len(LENGTHS), table[slot, CELLS]), np.int32),
    )


@leaf_kernel
def _unpack_rule(values):
    return HistoryRule(
        int(values[0]), int(values[1]), int(values[2]), values[3], values[4], values[5], values[6]
    )


@leaf_kernel
def _back(capacity, place, steps):
    """Return the place `steps` back in the ring; given a place instead of steps, the number of steps back to it."""
    return place - steps if place >= steps else place - steps + capacity


@leaf_kernel
def _mix(key, token):
    """Return the key of an n-gram extended to the left by a token."""
    return (key + token + 1) * _SCATTER


@leaf_kernel
def _cell_of(key, mask):
    return (key ^ (key >> 29)) & mask


@leaf_kernel
def _match(tokens, place, text, stop, most):
    """Return the match length, at most `most`, of the texts up to a place and before `stop`."""
    length = 0
    while length < most and tokens[_back(len(tokens), place, length)] == text[stop - 1 - length]:
        length += 1
    return length


@leaf_kernel
def _enter_following(state, nodes, slot, _parent, depth, prob, tail, max_level):
    history, rule, scratch, candidates, end = state
    floor, stop = floor_of(nodes, tail, rule.floor), end + depth
    load_path(scratch.text, nodes, stop, slot)
    found = _gather(history, rule, scratch, candidates, stop, prob, floor)
    if slot == 0:
        for length in range(rule.max_match, 0, -1):
            if scratch.counts[length] > 0:
                scratch.match[0], scratch.match[1] = length, scratch.counts[length]
                break
    return enter_all(nodes, candidates, found, tail, depth + 1, slot, max_level)


@leaf_kernel
def _gather(history, rule, scratch, candidates, stop, prob, floor):
    """Distribute a node's probability to the tokens that may follow; return the number of candidates."""
    upper = min(stop, rule.max_match)
    _look_up(history, scratch, stop, upper)
    found, seen, count, kinds = 0, 0, np.int64(0), np.int64(0)
    remaining = prob * (1.0 - rule.doubt)
    for order in range(len(LENGTHS) - 1, -1, -1):
        if scratch.firsts[order] < 0:
            continue
        found, seen = _read(history, rule, scratch, candidates, stop, order, upper, found, seen)
        for length in range(upper, LENGTHS[order] - 1, -1):
            count += scratch.counts[length]
            kinds += scratch.kinds[length]
            if count > 0:
                taken = remaining * (count / (count + rule.beta * kinds + rule.alpha / (length * length)))
                scratch.shares[length] = taken / count
                remaining -= taken
                if remaining <= floor:
                    break
        if count > 0 and remaining <= floor:
            break
        upper = LENGTHS[order] - 1
    _hand_out(scratch, candidates, seen)
    clear_table(candidates, found)
    return found


@leaf_kernel
def _look_up(history, scratch, stop, most):
    """Find the starts of the lists for n-grams that end before `stop`, and reset the buffers."""
    tokens, _, heads, size = history
    newest, mask = (size - 1) % len(tokens), heads.shape[1] - 1
    scratch.counts[:] = 0
    scratch.kinds[:] = 0
    scratch.shares[:] = 0.0
    scratch.firsts[:] = -1
    key, order = np.int64(0), 0
    for length in range(1, min(most, LENGTHS[-1]) + 1):
        key = _mix(key, scratch.text[stop - length])
        if length == LENGTHS[order]:
            head = np.int64(heads[order, _cell_of(key, mask)])
            if head < 0:
                break  # longer n-grams cannot occur either
            scratch.firsts[order] = _back(len(tokens), newest, head)
            order += 1


@leaf_kernel
def _read(history, rule, scratch, candidates, stop, order, upper, found, seen):
    """Read the last occurrences of an n-gram that match at most `upper` tokens; return candidates and reads so far."""
    tokens, links, _, size = history
    capacity, longest = len(tokens), min(stop, rule.max_match, upper + 1)
    newest, held = (size - 1) % capacity, min(size, capacity)
    age, rows, steps = scratch.firsts[order], 0, 0
    while age < held and rows < rule.rows and steps < STEPS * rule.rows:
        steps += 1
        place = _back(capacity, newest, age)
        after = np.int64(tokens[_back(capacity, newest, age - 1)]) if age > 0 else np.int64(-1)
        # A place that belongs to another list, or was overwritten since, is not a match.
        length = _match(tokens, place, scratch.text, stop, min(longest, held - age)) if after >= 0 else 0
        if length >= LENGTHS[order]:
            rows += 1
            if length <= upper:
                candidate = place_of(candidates, found, after)
                found = max(found, candidate + 1)
                before = candidates.stamps[candidate]
                if length > before:
                    scratch.kinds[length] += 1
                    candidates.stamps[candidate] = length
                    if before > 0:
                        scratch.kinds[before] -= 1
                scratch.places[seen] = candidate
                scratch.lengths[seen] = length
                scratch.counts[length] += 1
                seen += 1
        step = np.int64(links[order, place])
        if step == 0:
            break
        age += step
    return found, seen


@leaf_kernel
def _hand_out(scratch, candidates, seen):
    """Give each occurrence the shares of its match length and all shorter ones."""
    total = 0.0
    for length in range(len(scratch.shares)):
        total += scratch.shares[length]
        scratch.shares[length] = total
    for i in range(seen):
        candidates.probs[scratch.places[i]] += scratch.shares[scratch.lengths[i]]
