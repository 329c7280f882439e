"""A circuit breaker: after some failures in a row nobody asks for a while; then a probe finds out whether all is well.

    closed --3 failures in a row--> open for 50 ms --time--> one probe --answered--> closed
                                      ^                          |
                                      +--- twice as long, to 5 s, failed

How long it stays open varies at random, so that many clients of one service do not come back at once.
"""

import random
import threading
import time
from collections.abc import Callable

REFUSED = -1
"""What `enter` returns while nobody should ask."""


class Breaker:
    """Decides who may ask; threads share it.

    A caller takes a ticket, and hands it in with the outcome. Tickets from before the last change of state are ignored:
    they say nothing about the service of now.
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
            failures: in a row, after which it opens.
            first: seconds that it is open at first, at most; at least half of that.
            longest: seconds that it is open at most.
            probe: seconds after which an unanswered probe is given up.
            clock: returns seconds.
            chance: returns numbers from 0 to 1.
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
        """Make the lock anew: in a forked process nobody may be left to release it."""
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether only a probe, now and then, may ask."""
        return self._open

    def enter(self) -> int:
        """Return a ticket, or `REFUSED`."""
        if not self._open:
            return self._ticket
        with self._lock:
            return self._probe_ticket()

    def _probe_ticket(self) -> int:
        """Return the ticket of a probe, if it is time for one."""
        if not self._open:
            return self._ticket  # since a moment ago
        now = self._clock()
        if now < self._until:
            return REFUSED
        self._until = now + self._probe
        self._ticket += 1
        return self._ticket

    def succeed(self, ticket: int) -> None:
        """Note that the service has answered."""
        if not self._failures and not self._open:
            return
        with self._lock:
            if ticket == self._ticket:
                self._close()

    def fail(self, ticket: int) -> bool:
        """Note that the service has failed; return whether that opened the breaker."""
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
        """Have nobody ask for so many seconds, and up to a tenth more, as the service wants it."""
        with self._lock:
            if ticket == self._ticket:
                self._stay_open(seconds * (1.0 + 0.1 * self._chance()))

    def abandon(self, ticket: int) -> None:
        """Hand in a ticket that was not used. If it was that of the probe, the next caller gets the probe."""
        with self._lock:
            if ticket == self._ticket and self._open:
                self._until = self._clock()

    def reset(self) -> None:
        """Close: the service is known to be well."""
        with self._lock:
            self._ticket += 1
            self._close()

    def _close(self) -> None:
        """Let everybody ask."""
        self._failures = self._openings = 0
        self._open = False

    def _stay_open(self, seconds: float) -> None:
        """Let nobody ask for a while; tickets given so far are void."""
        self._until = self._clock() + seconds
        self._ticket += 1
        self._open = True
