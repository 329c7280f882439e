"""Requests that differ from an earlier one in id and contexts alone: a decoder sends thousands of them.

A client that has prepared the first fills in the next; a service that has checked the first only compares bytes: equal
ones are as valid as they were.
"""

import numpy as np
from numpy.typing import NDArray

from draftstore.remote.wire import CONTEXT, HEADER, decode_request

_ID = slice(8, HEADER.size)
"""Bytes of the request id, the last field of the header."""


class FixedBytes:
    """The bytes of a draft request's frame around its id and its contexts.

    Attributes:
        longest: maximum size of its answer in bytes, where that matters.
    """

    __slots__ = ("_begin", "_count", "_end", "_fields", "_names", "_shape", "_size", "_start", "longest")

    def __init__(self, data: bytes, shape: tuple[int, ...], longest: int = 0) -> None:
        """Hold those of the frame of a valid request without sections, whose contexts have this shape."""
        request = decode_request(data[HEADER.size :])
        names = len(request.name.encode()) + len(request.strategy.encode())
        self._shape = shape
        self._count = request.contexts.size
        self._size = len(data)
        self._end = self._size - names
        self._begin = self._end - CONTEXT.itemsize * self._count
        self._start = data[: _ID.start]
        self._fields = data[HEADER.size : self._begin]
        self._names = data[self._end :]
        self.longest = longest

    def frame(self, request_id: int, contexts: NDArray[np.int32]) -> bytes:
        """Return the frame of one more request, for contexts of this shape and of the type `CONTEXT`."""
        number = request_id.to_bytes(8, "little")
        return b"".join((self._start, number, self._fields, contexts.tobytes(), self._names))

    def match(self, data: bytes) -> tuple[int, NDArray[np.int32]] | None:
        """Return id and contexts, int32 [batch, width], of a whole frame with these bytes; None for other data."""
        if (
            len(data) != self._size
            or data[: _ID.start] != self._start
            or data[HEADER.size : self._begin] != self._fields
            or data[self._end :] != self._names
        ):
            return None
        contexts = np.frombuffer(data, CONTEXT, self._count, self._begin).reshape(self._shape)
        return int.from_bytes(data[_ID], "little"), contexts
