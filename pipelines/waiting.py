"""Runs that build the same wait for each other: the second finds what the first has made."""

import itertools
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import TypeVar

from draftstore.errors import BuildRunningError
from pipelines.progress import Logger

SECONDS = 5.0
REMINDER = 120
"""Attempts between two log lines: ten minutes."""

T = TypeVar("T")


def when_free(
    make: Callable[[], T], path: Path, logger: Logger, made: Callable[[], T | None] = lambda: None
) -> T:
    """Make something; if another process is building in the same place, do so when it has ended.

    There is no limit: the lock of the other process ends with it, however that happens.

    Args:
        make: makes it.
        path: its place, for the log.
        logger: logger that says what is waited for.
        made: returns what the other process has made and registered, None if it must still be made.
    """
    for attempt in itertools.count():
        try:
            return make()
        except BuildRunningError:
            if attempt % REMINDER == 0:
                logger.info("another run is building %s: this one waits until that has ended", path)
        sleep(SECONDS)
        if (found := made()) is not None:
            return found
    raise AssertionError("unreachable")
