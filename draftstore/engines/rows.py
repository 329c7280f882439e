"""The texts in the rows of an engine's batch, told apart by their ids alone.

An engine that hands out no request ids moves requests between the rows of its batch, swaps them, takes them out and
brings them back. What names a text is what it was: a row goes on with the text whose ids are those before its new ones.
Two texts of equal ids are equal to a drafter, too, so they may change places; no two rows ever get the same one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.engines.proposer import PATIENCE


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


class _Known(NamedTuple):
    """A text, and the step in which a row had it last."""

    ids: bytes
    step: int


class Rows:
    """Finds the text of every row; costs a copy and a comparison of its ids."""

    def __init__(self) -> None:
        """Begin without texts."""
        self._texts: dict[int, _Known] = {}
        self._there: dict[int, int] = {}
        self._steps = self._last = 0

    def __len__(self) -> int:
        """Return the number of texts that are remembered."""
        return len(self._texts)

    def find(self, rows: Sequence[Row]) -> list[int]:
        """Return a number for the text of each row: the same as long as the text goes on.

        Args:
            rows: all rows with new tokens, each place once.
        """
        self._steps += 1
        ids = [row.ids.tobytes() for row in rows]
        before = [text[: len(text) - row.ids.itemsize * row.new] for row, text in zip(rows, ids, strict=True)]
        found = {
            place: key
            for place, row in enumerate(rows)
            if (key := self._there.get(row.place)) is not None and self._texts[key].ids == before[place]
        }
        if len(found) < len(rows):
            self._find_moved(rows, before, found)
        keys = [found[place] if place in found else self._next() for place in range(len(rows))]
        for key, text in zip(keys, ids, strict=True):
            self._texts[key] = _Known(text, self._steps)
        self._there = {row.place: key for row, key in zip(rows, keys, strict=True)}
        if self._steps % PATIENCE == 0:
            oldest = self._steps - PATIENCE
            self._texts = {key: text for key, text in self._texts.items() if text.step > oldest}
        return keys

    def _find_moved(self, rows: Sequence[Row], before: Sequence[bytes], found: dict[int, int]) -> None:
        """Find texts that were in other rows, then those that went on unseen where they were."""
        free = self._texts.keys() - found.values()
        by_size: dict[int, list[int]] = {}
        for key in sorted(free):
            by_size.setdefault(len(self._texts[key].ids), []).append(key)
        missing = [place for place in range(len(rows)) if place not in found]
        for place in missing:
            same = (key for key in by_size.get(len(before[place]), ()) if key in free)
            moved = next((key for key in same if self._texts[key].ids == before[place]), None)
            if moved is not None:
                found[place] = moved
                free.remove(moved)
        for place in missing:
            there = self._there.get(rows[place].place)
            if place not in found and there in free and before[place].startswith(self._texts[there].ids):
                found[place] = there
                free.remove(there)

    def _next(self) -> int:
        self._last += 1
        return self._last
