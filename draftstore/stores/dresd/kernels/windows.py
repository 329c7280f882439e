"""Windows of a text for a model's context length; longer texts have overlapping windows."""

from collections.abc import Iterator
from typing import NamedTuple

OVERLAP = 4
"""Windows overlap by one part in this many, for context."""


class Window(NamedTuple):
    """A window of a text.

    Attributes:
        start: where reading starts.
        first: first position whose state is used; those before are context.
        stop: end of the window.
    """

    start: int
    first: int
    stop: int


def cut_windows(length: int, size: int) -> Iterator[Window]:
    """Yield the windows of a text, whose used positions cover it exactly once.

        cut_windows(11, 8):  [0, 8) used from 0, [6, 11) used from 8

    Args:
        length: length of the text.
        size: maximum positions of a window, at least 1.
    """
    first = 0
    while first < length:
        start = max(first - size // OVERLAP, 0)
        stop = min(start + size, length)
        yield Window(start, first, stop)
        first = stop
