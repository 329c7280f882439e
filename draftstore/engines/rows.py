"""The texts in the rows of an engine's batch, told apart by their ids alone.

An engine that hands out no request ids moves requests between the rows of its batch, swaps them, takes them out and
brings them back. What names a text is what it was: a row goes on with the text whose ids are those before its new ones.
Two texts of equal ids are equal to a drafter, too, so they may change places; no two rows ever get the same one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.engines.proposer import TAIL, forget_old


class Row(NamedTuple):
    """A row that has got new tokens.

    Attributes:
        place: its number in the batch.
        ids: int32 [n], its whole text.
        new: number of its last ids that are new in this step.
    """

    place: int
    ids: NDArray[np.int32]
    new: int


class _Known:
    """A text: the first `size` of its `ids`, as a row had it last in step `step`."""

    def __init__(self) -> None:
        self.ids: NDArray[np.int32] = np.empty(0, np.int32)
        self.size = self.step = 0

    def begins(self, row: Row, *, whole: bool = True) -> bool:
        """Return True if a row goes on with this text; unless `whole`, tokens may have come unseen."""
        before = len(row.ids) - row.new
        fits = self.size == before if whole else self.size <= before
        return fits and bool(np.array_equal(self.ids[: self.size], row.ids[: self.size]))

    def grow(self, row: Row, step: int) -> None:
        """Take the new tokens of a row that goes on with this text."""
        if len(row.ids) > len(self.ids):
            room = np.empty(len(row.ids) * 5 // 4 + 16, np.int32)
            room[: self.size] = self.ids[: self.size]
            self.ids = room
        self.ids[self.size : len(row.ids)] = row.ids[self.size :]
        self.size, self.step = len(row.ids), step


class Rows:
    """Finds the text of every row; costs a comparison of its ids."""

    def __init__(self) -> None:
        """Begin without texts."""
        self._texts: dict[int, _Known] = {}
        self._there: dict[int, int] = {}
        self._steps = self._last = 0

    def __len__(self) -> int:
        """Return the number of texts that are remembered."""
        return len(self._texts)

    def find(self, rows: Sequence[Row]) -> list[int]:
        """Return a number for the text of each row: the same as long as the text goes on."""
        self._steps += 1
        found = {
            place: key
            for place, row in enumerate(rows)
            if (key := self._there.get(row.place)) is not None and self._texts[key].begins(row)
        }
        if len(found) < len(rows):
            self._find_moved(rows, found)
        keys = [found[place] if place in found else self._next() for place in range(len(rows))]
        for key, row in zip(keys, rows, strict=True):
            self._texts[key].grow(row, self._steps)
        self._there = {row.place: key for row, key in zip(rows, keys, strict=True)}
        forget_old(self._texts, self._steps)
        return keys

    def _find_moved(self, rows: Sequence[Row], found: dict[int, int]) -> None:
        """Find texts that were in other rows, then those that went on unseen where they were."""
        taken = set(found.values())
        missing = [place for place in range(len(rows)) if place not in found]
        sizes = {len(rows[place].ids) - rows[place].new for place in missing}
        by_end: dict[tuple[int, bytes], list[int]] = {}
        for key, text in self._texts.items():
            if text.size in sizes and key not in taken:
                by_end.setdefault(_end(text.ids, text.size), []).append(key)
        for place in missing:
            row = rows[place]
            same = (key for key in by_end.get(_end(row.ids, len(row.ids) - row.new), ()) if key not in taken)
            moved = next((key for key in same if self._texts[key].begins(row)), None)
            if moved is not None:
                found[place] = moved
                taken.add(moved)
        for place in missing:
            there = self._there.get(rows[place].place)
            if place in found or there is None or there in taken:
                continue
            if self._texts[there].begins(rows[place], whole=False):
                found[place] = there
                taken.add(there)

    def _next(self) -> int:
        self._last += 1
        self._texts[self._last] = _Known()
        return self._last


def _end(ids: NDArray[np.int32], size: int) -> tuple[int, bytes]:
    """Return the size and the last ids of a text, by which few others have to be compared with it."""
    return size, ids[max(0, size - TAIL) : max(0, size)].tobytes()
