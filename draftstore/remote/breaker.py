"""A circuit breaker: after several failures in a row requests pause; then a probe tests the service.

    closed --3 failures in a row--> open for 50 ms --time--> one probe --answered--> closed
                                      ^                          |
                                      +--- twice as long, to 5 s, failed

The open time is randomised, so that the clients of a service do not return all at once.
"""

import random
import threading
import time
from collections.abc import Callable

REFUSED = -1
"""Result of `enter` while requests are not admitted."""


class Breaker:
    """Admits or refuses requests; thread-safe.

    A caller takes a ticket and returns it with the outcome. Tickets from before the last state change are ignored: they
    say nothing about the present service.
    """

    def __init__(
        self,
        *,
        failures: int = 3,
        first: float = 0.05,
        longest: float = 5.0,
        probe: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Start closed.

        Args:
            failures: failures in a row that open it.
            first: maximum seconds of the first open period; the minimum is half of it.
            longest: maximum seconds of any open period.
            probe: seconds after which an unanswered probe is abandoned.
            clock: returns seconds.
            chance: returns random numbers from 0 to 1.
        """
        self._most = failures
        self._first = first
        self._longest = longest
        self._probe = probe
        self._clock = clock
        self._chance = chance
        self._open = False
        self._failures = 0
        self._openings = 0
        self._until = 0.0
        self._ticket = 0
        self.renew()

    def renew(self) -> None:
        """Replace the lock: in a forked process its holder may not exist."""
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether only occasional probes are admitted."""
        return self._open

    def enter(self) -> int:
        """Return a ticket, or `REFUSED`."""
        if not self._open:
            return self._ticket
        with self._lock:
            return self._probe_ticket()

    def _probe_ticket(self) -> int:
        """Return a probe's ticket if one is due."""
        if not self._open:
            return self._ticket  # closed meanwhile
        now = self._clock()
        if now < self._until:
            return REFUSED
        self._until = now + self._probe
        self._ticket += 1
        return self._ticket

    def succeed(self, ticket: int) -> None:
        """Record an answer."""
        if not self._failures and not self._open:
            return
        with self._lock:
            if ticket == self._ticket:
                self._close()

    def fail(self, ticket: int) -> bool:
        """Record a failure; return whether it opened the breaker."""
        with self._lock:
            if ticket != self._ticket:
                return False
            self._failures += 1
            if not self._open and self._failures < self._most:
                return False
            wait = min(self._longest, self._first * 2.0 ** min(self._openings, 32))
            self._openings += 1
            self._stay_open(wait * (0.5 + 0.5 * self._chance()))
            return True

    def pause(self, ticket: int, seconds: float) -> None:
        """Open for `seconds`, plus up to a tenth, as requested by the service."""
        with self._lock:
            if ticket == self._ticket:
                self._stay_open(seconds * (1.0 + 0.1 * self._chance()))

    def abandon(self, ticket: int) -> None:
        """Return an unused ticket; if it was the probe's, the next caller gets the probe."""
        with self._lock:
            if ticket == self._ticket and self._open:
                self._until = self._clock()

    def reset(self) -> None:
        """Close it: the service is known to work."""
        with self._lock:
            self._ticket += 1
            self._close()

    def _close(self) -> None:
        """Admit all requests."""
        self._failures = self._openings = 0
        self._open = False

    def _stay_open(self, seconds: float) -> None:
        """Stay open for a while; earlier tickets become invalid."""
        self._until = self._clock() + seconds
        self._ticket += 1
        self._open = True
