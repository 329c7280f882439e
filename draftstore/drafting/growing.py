"""The ids of a growing text, with detection of what is new."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""


class GrowingIds:
    """The ids of a growing text, copied into a buffer with room for more."""

    def __init__(self, ids: ArrayLike = ()) -> None:
        """Start from ids, int [any]."""
        self._buffer: NDArray[np.int32] = np.empty(0, np.int32)
        self._size = 0
        self.put(0, ids)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> NDArray[np.int32]:
        """The text, int32 [any]: a view, which is stable as long as the text only grows."""
        return self._buffer[: self._size]

    def begins(self, ids: NDArray[np.integer], last: int | None = None) -> bool:
        """Return True if `ids` begin with this text; only its `last` ids are compared if that is given."""
        first = 0 if last is None else max(0, self._size - last)
        same = np.array_equal(ids[first : self._size], self._buffer[first : self._size])
        return len(ids) >= self._size and same

    def put(self, start: int, ids: ArrayLike) -> bool:
        """Replace the ids from `start` on; return True if the text only grew."""
        new = np.asarray(ids, np.int32)
        seen, end = self._buffer[start : self._size], start + len(new)
        grew = bool(np.array_equal(new[: len(seen)], seen))
        if end > len(self._buffer):
            room = np.empty(end + end // 4 + SPARE, np.int32)
            room[:start] = self._buffer[:start]
            self._buffer = room
        self._buffer[start:end] = new
        self._size = end
        return grew
