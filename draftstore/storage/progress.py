"""Progress of a build: every step reports to its own callback, provided by the caller."""

from collections.abc import Callable
from typing import Protocol

from draftstore.errors import counted


class Step(Protocol):
    """Takes the progress of one step."""

    def __call__(self, done: int, total: int | None, detail: str = "") -> None:
        """Report the amount done, the total (None if unknown), and further details."""


Progress = Callable[[str, str], Step]
"""Returns the callback of a step, given its name and the unit of its amounts: `progress("sorting", "tokens")`."""


def silent(_step: str, _unit: str) -> Step:
    """Report nothing."""
    return lambda _done, _total, _detail="": None


def tokenizing(progress: Progress) -> Callable[[int, int, int], None]:
    """Return the callback for tokenizing, which takes documents, tokens and characters."""
    step = progress("tokenizing", "tokens")
    return lambda documents, tokens, _characters: step(tokens, None, counted(documents, "document"))
