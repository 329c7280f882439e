"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60.0
"""Time that anything may take: far beyond what it takes on a busy machine."""


def until(
    condition: Callable[[], object], what: object = "it does not happen", seconds: float = SECONDS
) -> None:
    """Wait for something to become true.

    Args:
        condition: tells whether it is; asked again and again.
        what: what the failure says; a function is called for it then.
        seconds: how long it may take.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
