"""The texts in the rows of an engine's batch, identified by their token ids alone.

An engine that provides no request ids moves requests between the rows of its batch, swaps them, removes them and brings
them back. A text is identified by its previous ids: a row continues the text whose ids precede the row's new ones.
Texts with equal ids are also equal to a drafter, so they may be swapped, but no two rows ever get the same text.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.growing import GrowingIds
from draftstore.engines.proposer import TAIL


class Row(NamedTuple):
    """A row with new tokens.

    Attributes:
        place: its index in the batch.
        ids: int32 [n], its whole text.
        new: number of ids at its end that are new in this step.
    """

    place: int
    ids: NDArray[np.int32]
    new: int

    @property
    def before(self) -> NDArray[np.int32]:
        """Its text before this step."""
        return self.ids[: len(self.ids) - self.new]


class Rows:
    """Finds the text of every row by comparing ids."""

    def __init__(self, texts: Mapping[Hashable, GrowingIds]) -> None:
        """Search `texts`, see `Proposer.texts`: keys are assigned here; the proposer extends and forgets texts."""
        self._texts = texts
        self._there: dict[int, Hashable] = {}
        self._last = 0

    def find(self, rows: Sequence[Row]) -> list[Hashable]:
        """Return a key for the text of each row, which stays the same as long as the text continues."""
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
        """Find texts that were in other rows, then those that continued unobserved in the same row."""
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
        """Return True if a text equals that of a row before this step."""
        text = self._texts.get(key)
        return text is not None and len(text) == len(row.before) and text.begins(row.before)

    def _next(self) -> int:
        self._last += 1
        return self._last


def _end(ids: NDArray[np.int32]) -> tuple[int, bytes]:
    """Return the size and the last ids of a text, which narrow down the texts to compare."""
    return len(ids), ids[-TAIL:].tobytes()
