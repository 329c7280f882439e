"""Runs that build the same wait for each other: the second finds what the first has made."""

from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TypeVar

from draftstore.errors import BuildRunningError
from pipelines.progress import Logger

POLL_SECONDS = 5.0

T = TypeVar("T")


def when_free(
    make: Callable[[], T], path: Path, logger: Logger, made: Callable[[], T | None] = lambda: None
) -> T:
    """Make something at `path`, or find what another process, which was building there, has `made` meanwhile.

    There is no limit: the lock of the other process ends with it, however that happens.
    """
    waiting = False
    while True:
        try:
            return make()
        except BuildRunningError:
            if not waiting:
                logger.info("another run is building %s: this one waits until that has ended", path)
                waiting = True
        sleep(POLL_SECONDS)
        if (found := made()) is not None:
            return found
