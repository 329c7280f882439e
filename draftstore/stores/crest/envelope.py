"""The format of an n-gram's entry: two counts and the draft tree, in the codes of the store.

Before coding, little-endian:

    0    u32    occurrences of the n-gram, at most 2^32 - 1
    4    u32    distinct tokens that followed it, counting the end of a document as one
    8           the draft tree, see draftstore.trees.tree

A stored value is the same in prefix codes, see draftstore.stores.crest.coding: numbers that are rarer among the trees
of the build take more bits. A tree takes some 260 bytes before coding and 130 after.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import StoreError
from draftstore.stores.crest.codes import fit_codes, read_codes
from draftstore.stores.crest.coding import PADDING, code_entries, read_entries
from draftstore.trees.codec import MAX_NODES
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree

ENTRIES_VERSION = 2
"""Version of values and dictionary."""

_COUNTS = struct.Struct("<II")
_MAX_COUNT = (1 << 32) - 1


class Entry(NamedTuple):
    """The data of an n-gram: draft tree, occurrences, distinct tokens that follow."""

    tree: DraftTree
    occurrences: int
    distinct: int


def entry_bytes(entry: Entry) -> bytes:
    """Return an entry before coding."""
    return (
        _COUNTS.pack(min(entry.occurrences, _MAX_COUNT), min(entry.distinct, _MAX_COUNT))
        + entry.tree.to_bytes()
    )


def train_dictionary(samples: Sequence[Entry]) -> bytes:
    """Return the file of the codes fitted to sample entries."""
    numbers = [number for entry in samples for number in (entry.occurrences, entry.distinct)]
    sizes = [len(entry.tree) for entry in samples]
    lengths = [min(number, _MAX_COUNT).bit_length() for number in (*numbers, *sizes)]
    nothing = np.zeros(0, np.int64)
    tokens = np.concatenate([nothing, *(entry.tree.tokens for entry in samples)])
    parents = np.concatenate([nothing, *(entry.tree.parents for entry in samples)]) + 1
    levels = [np.diff(entry.tree.levels.astype(np.int64), prepend=0) for entry in samples]
    return fit_codes([np.array(lengths, np.int64), tokens, parents, np.concatenate([nothing, *levels])])


def damaged(error: object) -> StoreError:
    """Return the error for an unreadable entry."""
    return StoreError(f"an entry cannot be read ({error}): the store is damaged, build it again")


class Envelope:
    """Encodes and decodes the entries of one store, by a file of codes that may be empty; threads may share it.

    Raises:
        StoreError: the codes or an entry are damaged.
    """

    def __init__(self, dictionary: bytes) -> None:
        try:
            self._writing, self._reading = read_codes(dictionary)
        except ValueError as error:
            raise StoreError(f"the dictionary of the store is damaged ({error}): build it again") from None

    def pack(self, entries: Sequence[bytes]) -> list[bytes]:
        """Encode entries."""
        data = np.frombuffer(b"".join(entries), np.uint8)
        problem, values, ends = code_entries(self._writing, data, _stops(entries))
        if problem:
            raise damaged(f"error code {problem} of the tree codec")
        packed = values.tobytes()
        return [packed[start:end] for start, end in pairwise([0, *ends.tolist()])]

    def open(self, value: bytes) -> Entry:
        """Decode one entry."""
        tokens, parents, levels, sizes, occurrences, distinct = self.read(
            [value], np.zeros(1, np.int64), 1, MAX_NODES, LOWEST_LEVEL
        )
        size = int(sizes[0])
        tree = DraftTree(*(array[0, :size].copy() for array in (tokens, parents, levels)))
        return Entry(tree, int(occurrences[0]), int(distinct[0]))

    def read(
        self, values: Sequence[bytes], rows: NDArray[np.int64], batch: int, most: int, max_level: int
    ) -> tuple[NDArray[Any], ...]:
        """Decode entries into rows of a batch; see `draftstore.stores.crest.coding.read_entries`."""
        ends = _stops(values)
        padding = bytes(PADDING + -int(ends[-1] if len(ends) else 0) % 4)
        coded = np.frombuffer(b"".join([*values, padding]), np.uint32).byteswap()
        problem, *found = read_entries(self._reading, coded, ends, rows, batch, most, max_level)
        if problem:
            raise damaged(f"error code {problem} of the tree codec")
        return tuple(found)


def _stops(parts: Sequence[bytes]) -> NDArray[np.int64]:
    return np.fromiter(accumulate(map(len, parts)), np.int64, len(parts))
