"""The texts in the rows of an engine's batch, told apart by their ids alone.

An engine that hands out no request ids moves requests between the rows of its batch, swaps them, takes them out and
brings them back. What names a text is what it was: a row goes on with the text whose ids are those before its new ones.
Two texts of equal ids are equal to a drafter, too, so they may change places; no two rows ever get the same one.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.growing import GrowingIds
from draftstore.engines.proposer import TAIL


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

    @property
    def before(self) -> NDArray[np.int32]:
        """Its text before this step."""
        return self.ids[: len(self.ids) - self.new]


class Rows:
    """Finds the text of every row; costs a comparison of its ids."""

    def __init__(self, texts: Mapping[Hashable, GrowingIds]) -> None:
        """Search `texts`, see `Proposer.texts`: by the numbers from here, they grow and are forgotten there."""
        self._texts = texts
        self._there: dict[int, Hashable] = {}
        self._last = 0

    def find(self, rows: Sequence[Row]) -> list[Hashable]:
        """Return a number for the text of each row: the same as long as the text goes on."""
        found = {
            place: key
            for place, row in enumerate(rows)
            if (key := self._there.get(row.place)) is not None and self._is(key, row)
        }
        if len(found) < len(rows):
            self._find_moved(rows, found)
        keys = [found[place] if place in found else self._next() for place in range(len(rows))]
        self._there = {row.place: key for row, key in zip(rows, keys, strict=True)}
        return keys

    def _find_moved(self, rows: Sequence[Row], found: dict[int, Hashable]) -> None:
        """Find texts that were in other rows, then those that went on unseen where they were."""
        taken = set(found.values())
        missing = [place for place in range(len(rows)) if place not in found]
        sizes = {len(rows[place].before) for place in missing}
        by_end: dict[tuple[int, bytes], list[Hashable]] = {}
        for key, text in self._texts.items():
            if len(text) in sizes and key not in taken:
                by_end.setdefault(_end(text.ids), []).append(key)
        for place in missing:
            row = rows[place]
            same = (key for key in by_end.get(_end(row.before), ()) if key not in taken)
            moved = next((key for key in same if self._is(key, row)), None)
            if moved is not None:
                found[place] = moved
                taken.add(moved)
        for place in missing:
            there = self._there.get(rows[place].place)
            if place in found or there is None or there in taken:
                continue
            if there in self._texts and self._texts[there].begins(rows[place].before):
                found[place] = there
                taken.add(there)

    def _is(self, key: Hashable, row: Row) -> bool:
        """Return True if a text is that of a row before this step."""
        text = self._texts.get(key)
        return text is not None and len(text) == len(row.before) and text.begins(row.before)

    def _next(self) -> int:
        self._last += 1
        return self._last


def _end(ids: NDArray[np.int32]) -> tuple[int, bytes]:
    """Return the size and the last ids of a text, by which few others have to be compared with it."""
    return len(ids), ids[-TAIL:].tobytes()
