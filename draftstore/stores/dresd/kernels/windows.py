"""What a model reads at once: windows of texts, those that are longer with an overlap."""

from collections.abc import Iterator
from typing import NamedTuple

OVERLAP = 4
"""One part in so many of a window is read again, for its context, from the one before."""


class Window(NamedTuple):
    """A stretch of a text.

    Attributes:
        start: where reading starts.
        first: the first position whose state counts; those before are context.
        stop: where it ends.
    """

    start: int
    first: int
    stop: int


def cut_windows(length: int, size: int) -> Iterator[Window]:
    """Yield the windows of a text, which together count every position once.

        cut_windows(11, 8):  [0, 8) counts from 0, [6, 11) counts from 8

    Args:
        length: positions of the text.
        size: most positions of a window, at least 1.
    """
    first = 0
    while first < length:
        start = max(first - size // OVERLAP, 0)
        stop = min(start + size, length)
        yield Window(start, first, stop)
        first = stop
