"""The text that a model reads to build a dense store, chosen from tokens alone: entries, windows, blocks.

A document x_0 .. x_(n-1) has an entry at i for every i from 0 to n - 3: its vector comes from the state at i, its first
token is x_(i+1), its continuation begins with x_(i+2). Entries with the same prefix x_0 .. x_i have the same state.
Those with the same next 21 tokens are duplicates; of the others only the first 64 are kept, as many as a draft uses:
chats with one template begin alike, and many occur twice. So each document keeps its entries from some position on:

    documents   a b c d e #    a b c x y z #        with 1 instead of 21: entries at 0 1 2 and 2

The windows with entries are read in blocks, the unit in which a build resumes.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel

BLOCK_TOKENS = 1 << 16
"""Tokens of a block, give or take a window."""
NEXT = 21
"""Tokens after an entry that identify it: its first token, and a continuation of 20."""
ALIKE = 64
"""Maximum entries with the same prefix."""
BEHIND = 2
"""Distance of an entry's continuation from its state."""

_DOCUMENT, _START, _FIRST, _STOP = range(4)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHARED = np.int64(-1)
OVERLAP = 4
"""Windows overlap by one part in this many, for context."""


class Passages(NamedTuple):
    """The passages to read.

    Attributes:
        starts: int64 [documents + 1], position in tokens.bin of each document's first token.
        windows: int64 [windows, 4]: document, then start of reading, start of entries, and end of both.
        blocks: int64 [blocks + 1], first window of each block.
        entries: int64 [blocks + 1], first entry of each block.
        repeated: number of entries dropped as duplicates or surplus.
    """

    starts: NDArray[np.int64]
    windows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    entries: NDArray[np.int64]
    repeated: int

    @property
    def total(self) -> int:
        """Number of entries in all blocks."""
        return int(self.entries[-1])

    def _windows_of(self, block: int) -> NDArray[np.int64]:
        return self.windows[self.blocks[block] : self.blocks[block + 1]]

    def tokens_of(self, blocks: Iterable[int]) -> int:
        """Return the number of tokens that the model reads for some blocks, without BOS."""
        return sum(int((rows[:, _STOP] - rows[:, _START]).sum()) for rows in map(self._windows_of, blocks))

    def entries_of(self, blocks: Iterable[int]) -> int:
        """Return the number of entries in some blocks."""
        return sum(int(self.entries[block + 1] - self.entries[block]) for block in blocks)

    def places(self, block: int) -> NDArray[np.int64]:
        """Return int64 [entries of the block]: the start of their continuations in tokens.bin."""
        windows = self._windows_of(block)
        sizes = windows[:, _STOP] - windows[:, _FIRST]
        ahead = np.repeat(windows[:, _FIRST] - (np.cumsum(sizes) - sizes), sizes)
        places: NDArray[np.int64] = np.arange(len(ahead)) + ahead + BEHIND
        return places

    def texts(
        self, block: int, tokens: NDArray[Any], bos: tuple[int, ...]
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return the ids of each window of a block, and int64 [windows], the first row of their states with an entry.

        `bos` precedes each window, except a document's first one if it already begins with `bos`.
        """
        head = np.array(bos, np.int64)
        texts, rows = [], []
        for document, start, first, stop in self._windows_of(block).tolist():
            ids = tokens[start:stop].astype(np.int64)
            there = start == self.starts[document] and np.array_equal(ids[: len(bos)], head)
            texts.append(ids if there else np.concatenate([head, ids]))
            rows.append(first - start + len(texts[-1]) - len(ids))
        return texts, np.array(rows, np.int64)


def find_passages(
    tokens: NDArray[Any], starts: NDArray[np.int64], window: int, alike: int = ALIKE
) -> Passages:
    """Choose the passages, with windows of at most `window` tokens and at most `alike` entries with the same prefix.

    `tokens` is unsigned [tokens], documents, each ended by the sentinel; `starts` int64 [documents + 1], their
    positions.
    """
    firsts = first_entries(tokens, starts, alike)
    ends = np.diff(starts) - 1 - BEHIND  # sentinel
    rows = array("q")
    for document in np.flatnonzero(ends > firsts).tolist():
        place, first = int(starts[document]), int(firsts[document])
        for cut in cut_windows(int(ends[document]), window):
            if cut.stop > first:
                rows.extend((document, place + cut.start, place + max(cut.first, first), place + cut.stop))
    windows = np.frombuffer(rows, np.int64).reshape(-1, 4) if rows else np.empty((0, 4), np.int64)
    sizes = windows[:, _STOP] - windows[:, _START]
    blocks = (np.cumsum(sizes) - sizes) // BLOCK_TOKENS
    cuts = np.append(np.flatnonzero(np.diff(blocks, prepend=-1)), len(windows))
    entries = np.append(0, np.cumsum(windows[:, _STOP] - windows[:, _FIRST]))
    repeated = int(np.maximum(ends, 0).sum() - entries[-1])
    return Passages(starts, windows, cuts, entries[cuts], repeated)


@kernel
def first_entries(tokens, starts, alike):
    """Return int64 [documents]: the first position of each document whose entry is kept; see `find_passages`.

    A document, including its sentinel, is compared with all earlier ones by its prefixes. The hash table holds prefixes
    that documents share, with the number of entries kept there, and for each document its first unshared prefix. When
    another document has that prefix, the first document moves on to its next one: so the table is only as large as the
    shared prefixes.
    """
    firsts = np.zeros(len(starts) - 1, np.int64)
    keys, documents, counts = _new_table(1024)
    used = 0
    for document in range(len(firsts)):
        start, length = starts[document], starts[document + 1] - starts[document]
        prefix = _MULTIPLIER
        shared, crowded = length, 0
        for depth in range(length):
            if 2 * (used + 2) > len(keys):
                keys, documents, counts = _grow(keys, documents, counts)
            prefix = _mix(prefix, tokens[start + depth])
            slot = _find(keys, prefix)
            if keys[slot] == 0:
                keys[slot], documents[slot] = prefix, document
                used += 1
                shared = depth
                break
            other = documents[slot]
            if other != _SHARED:  # the prefix was unshared: that document moves on to its next one
                behind, end = starts[other] + depth + 1, starts[other + 1]
                documents[slot], counts[slot] = _SHARED, firsts[other] <= depth and behind + BEHIND < end
                if behind < end:
                    longer = _mix(prefix, tokens[behind])
                    below = _find(keys, longer)
                    keys[below], documents[below] = longer, other
                    used += 1
            if counts[slot] >= alike:
                crowded = depth + 1
        firsts[document] = length if shared == length else max(shared - NEXT, crowded)
        stop = start + max(min(shared, length - 1 - BEHIND), 0)
        _count(keys, counts, tokens[start:stop], firsts[document])
    return firsts


@kernel
def _count(keys, counts, beginning, first):
    """Count a document's kept entries along the prefix that it shares with others."""
    prefix = _MULTIPLIER
    for depth in range(len(beginning)):
        prefix = _mix(prefix, beginning[depth])
        if depth >= first:
            counts[_find(keys, prefix)] += 1


@kernel
def _mix(prefix, token):
    """Return the hash of a prefix extended by a token; never 0, which marks an empty slot."""
    value = (prefix ^ (np.uint64(token) + np.uint64(1))) * _MULTIPLIER
    value = (value ^ (value >> np.uint64(29))) * _MULTIPLIER
    return (value ^ (value >> np.uint64(32))) | np.uint64(1)


@kernel
def _find(keys, key):
    """Return the slot of a key, or the empty slot for it."""
    slot = np.int64(key >> np.uint64(1)) & (len(keys) - 1)
    while keys[slot] != 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@kernel
def _new_table(size):
    return np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64)


@kernel
def _grow(keys, documents, counts):
    wide, moved, counted = _new_table(2 * len(keys))
    for old in range(len(keys)):
        if keys[old] != 0:
            slot = _find(wide, keys[old])
            wide[slot], moved[slot], counted[slot] = keys[old], documents[old], counts[old]
    return wide, moved, counted


class Window(NamedTuple):
    """A window of a text: start of reading, first position whose state is used (those before are context), and end."""

    start: int
    first: int
    stop: int


def cut_windows(length: int, size: int) -> Iterator[Window]:
    """Yield the windows of a text, each of at most `size` positions; their used positions cover it exactly once.

    11 positions in windows of 8 are [0, 8), used from 0, and [6, 11), used from 8.
    """
    first = 0
    while first < length:
        start = max(first - size // OVERLAP, 0)
        stop = min(start + size, length)
        yield Window(start, first, stop)
        first = stop
