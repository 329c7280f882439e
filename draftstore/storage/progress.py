"""Progress: each step of long work reports to its own callback, which the caller provides."""

from collections.abc import Callable
from typing import Protocol


class OnProgress(Protocol):
    """Takes the progress of one step."""

    def __call__(self, done: int, total: int | None, detail: str = "", /) -> None:
        """Report the amount done, the total (None if unknown), and further details."""


Progress = Callable[[str, str], OnProgress]
"""Returns the callback of a step, given its name and the unit of its amounts: `progress("sorting", "tokens")`."""


def ignore(_done: int, _total: int | None, _detail: str = "") -> None:
    """Report nothing about a step."""


def silent(_step: str, _unit: str) -> OnProgress:
    """Report nothing about any step."""
    return ignore
