"""Windows of a text for a model's context length; longer texts have overlapping windows."""

from collections.abc import Iterator
from typing import NamedTuple

OVERLAP = 4
"""Windows overlap by one part in this many, for context."""


class Window(NamedTuple):
    """A window of a text: start of reading, first position whose state is used (those before are context), and end."""

    start: int
    first: int
    stop: int


def cut_windows(length: int, size: int) -> Iterator[Window]:
    """Yield the windows of a text, each of at most `size` positions; their used positions cover it exactly once.

    11 positions in windows of 8 are [0, 8), used from 0, and [6, 11), used from 8.
    """
    first = 0
    while first < length:
        start = max(first - size // OVERLAP, 0)
        stop = min(start + size, length)
        yield Window(start, first, stop)
        first = stop
