"""Waiting for events in another thread or process."""

import threading
import time
from collections.abc import Callable, Iterable
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


def in_threads(calls: Iterable[Callable[[], object]]) -> None:
    """Run calls at the same time, each in a thread of its own; raise what was raised first.

    Args:
        calls: each may take `SECONDS`.
    """
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads), "a thread does not end"


def is_alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
