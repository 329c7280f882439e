"""Pauses after failures: an unavailable service gets no requests, so that a call costs a microsecond, not a deadline.

A pause begins immediately after a refused connection, or after three consecutive failures. It lasts 50 ms and doubles
with every further failure, up to 5 s; an answer resets it.
"""

import time
from collections.abc import Callable

FAILURES = 3
"""Consecutive failures that begin a pause."""
FIRST = 0.05
LONGEST = 5.0


class Quiet:
    """The pauses of one client; threads may share it, as a failure counted twice or not at all does no harm."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without a pause; `clock` returns seconds."""
        self._clock = clock
        self._until = 0.0
        self._failures = 0
        self._seconds = FIRST

    @property
    def holds(self) -> bool:
        """Whether no request should be sent now."""
        return self._until > 0.0 and self._clock() < self._until

    def succeed(self) -> None:
        """Reset after an answer of the service."""
        if self._failures or self._until:
            self._failures, self._seconds, self._until = 0, FIRST, 0.0

    def fail(self, *, refused: bool = False) -> bool:
        """Record a failure, or a refused connection; return whether a pause begins."""
        self._failures += 1
        if self.holds or not (refused or self._failures >= FAILURES):
            return False  # simultaneous failures of several threads count once
        self._until = self._clock() + self._seconds
        self._failures, self._seconds = FAILURES, min(2 * self._seconds, LONGEST)
        return True

    def pause(self, seconds: float) -> None:
        """Pause for `seconds`, at the request of the service or after a refusal."""
        self._until = self._clock() + seconds
