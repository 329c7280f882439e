"""What a model reads to build a dense store, decided on tokens alone: entries, windows, blocks.

A document x_0 .. x_(n-1) has an entry at i for every i from 0 to n - 3: its vector comes from the state at i, its first
token is x_(i+1), its continuation begins with x_(i+2). Entries of the same beginning x_0 .. x_i have the same state.
Those with the same next 21 tokens are one, and of the others the first 64 stay, as many as a draft looks at: all chats
of a template begin alike, and many are there twice. So of every document the entries from one position on stay:

    documents   a b c d e #    a b c x y z #        with 1 in place of 21: entries at 0 1 2 and 2

The windows (draftstore.stores.dresd.kernels.windows) that hold entries are read in blocks, the unit in which a build
goes on.
"""

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.jit import kernel
from draftstore.stores.dresd.kernels.windows import cut_windows

BLOCK_TOKENS = 1 << 16
"""Tokens of a block, give or take a window."""
NEXT = 21
"""Tokens behind an entry that tell it from others: its first token, and a continuation of 20."""
ALIKE = 64
"""Most entries of one beginning."""
BEHIND = 2
"""The continuation of an entry begins so many places behind its state."""

_DOCUMENT, _START, _FIRST, _STOP = range(4)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHARED = np.int64(-1)


class Passages(NamedTuple):
    """What there is to read.

    Attributes:
        starts: int64 [documents + 1], place in tokens.bin of each document's first token.
        windows: int64 [windows, 4]: document, then places where reading starts, where entries start, where both end.
        blocks: int64 [blocks + 1], first window of each block.
        entries: int64 [blocks + 1], first entry of each block.
        repeated: entries that are there already, or alike so many others, and left out.
    """

    starts: NDArray[np.int64]
    windows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    entries: NDArray[np.int64]
    repeated: int

    @property
    def total(self) -> int:
        """Entries of all blocks."""
        return int(self.entries[-1])

    def tokens_of(self, blocks: Iterable[int]) -> int:
        """Return how many tokens the model reads of some blocks, BOS not counted."""
        rows = [self.windows[self.blocks[block] : self.blocks[block + 1]] for block in blocks]
        return sum(int((row[:, _STOP] - row[:, _START]).sum()) for row in rows)

    def entries_of(self, blocks: Iterable[int]) -> int:
        """Return how many entries some blocks hold."""
        return sum(int(self.entries[block + 1] - self.entries[block]) for block in blocks)

    def places(self, block: int) -> NDArray[np.int64]:
        """Return int64 [entries of the block]: where in tokens.bin their continuations begin."""
        windows = self.windows[self.blocks[block] : self.blocks[block + 1]]
        sizes = windows[:, _STOP] - windows[:, _FIRST]
        ahead = np.repeat(windows[:, _FIRST] - (np.cumsum(sizes) - sizes), sizes)
        places: NDArray[np.int64] = np.arange(len(ahead)) + ahead + BEHIND
        return places

    def texts(
        self, block: int, tokens: NDArray[Any], bos: tuple[int, ...]
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Return what the model reads for a block.

        Args:
            block: its number.
            tokens: tokens.bin.
            bos: what stands before each window, unless its document begins so and it is the first of that.

        Returns:
            The ids of each window, and int64 [windows], in which row of their states entries start.
        """
        head = np.array(bos, np.int64)
        texts, rows = [], []
        for document, start, first, stop in self.windows[
            self.blocks[block] : self.blocks[block + 1]
        ].tolist():
            ids = tokens[start:stop].astype(np.int64)
            there = start == self.starts[document] and np.array_equal(ids[: len(bos)], head)
            texts.append(ids if there else np.concatenate([head, ids]))
            rows.append(first - start + len(texts[-1]) - len(ids))
        return texts, np.array(rows, np.int64)


def find_passages(
    tokens: NDArray[Any], starts: NDArray[np.int64], window: int, alike: int = ALIKE
) -> Passages:
    """Decide what the model reads.

    Args:
        tokens: unsigned [tokens], documents that are each closed by the sentinel.
        starts: int64 [documents + 1], place of each document's first token; the last entry is the end.
        window: most tokens of a window.
        alike: most entries of one beginning.
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
def first_entries(tokens: Any, starts: Any, alike: Any) -> Any:
    """Return int64 [documents]: the first position of each document from which on its entries stay.

    A document, its sentinel included, is compared with all earlier ones by its prefixes. The table holds hashes of
    prefixes: those that documents share, with the number of entries that stay there, and of each document the first one
    that it has alone. When a second document comes with that prefix, the first one moves on to its next: so the table
    is only as large as what documents share.

    Args:
        tokens: unsigned [tokens].
        starts: int64 [documents + 1]; documents include their sentinels.
        alike: most entries of one beginning.
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
            if other != _SHARED:  # it was alone with this prefix: it moves on to the next one
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
def _count(keys: Any, counts: Any, beginning: Any, first: Any) -> Any:
    """Count the entries of a document that stay, as far as it shares its beginning with others."""
    prefix = _MULTIPLIER
    for depth in range(len(beginning)):
        prefix = _mix(prefix, beginning[depth])
        if depth >= first:
            counts[_find(keys, prefix)] += 1


@kernel
def _mix(prefix: Any, token: Any) -> Any:
    """Return the hash of a prefix with one more token; never 0, which stands for an empty slot."""
    value = (prefix ^ (np.uint64(token) + np.uint64(1))) * _MULTIPLIER
    value = (value ^ (value >> np.uint64(29))) * _MULTIPLIER
    return (value ^ (value >> np.uint64(32))) | np.uint64(1)


@kernel
def _find(keys: Any, key: Any) -> Any:
    """Return the slot of a key, or the empty one where it belongs."""
    slot = np.int64(key >> np.uint64(1)) & (len(keys) - 1)
    while keys[slot] != 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@kernel
def _new_table(size: Any) -> Any:
    """Return an empty table: keys, documents, counts."""
    return np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64)


@kernel
def _grow(keys: Any, documents: Any, counts: Any) -> Any:
    """Return a table of twice the size with the same content."""
    wide, moved, counted = _new_table(2 * len(keys))
    for old in range(len(keys)):
        if keys[old] != 0:
            slot = _find(wide, keys[old])
            wide[slot], moved[slot], counted[slot] = keys[old], documents[old], counts[old]
    return wide, moved, counted
