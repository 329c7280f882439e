"""What a lookup service client remembers of its calls: counters of outcomes and drafts, and pauses after failures.

An unavailable service gets no requests, so that a call costs a microsecond, not a deadline. A pause begins immediately
after a refused connection, or after three consecutive failures. It lasts 50 ms and doubles with every further failure,
up to 5 s; an answer resets it.
"""

import enum
import threading
import time
from collections.abc import Callable, Sequence

FAILURES = 3
"""Consecutive failures that begin a pause."""
FIRST = 0.05
LONGEST = 5.0


class Outcome(enum.StrEnum):
    """Outcome of a call of `draft`; only the first yields drafts."""

    ANSWERED = "answered"
    SKIPPED = "skipped"
    """No request was sent: the service failed or refused recently, or the client is closed."""
    TIMEOUT = "timeout"
    """No answer within the deadline."""
    UNREACHABLE = "unreachable"
    """No service listens at the address, or connections are refused."""
    CLOSED = "closed"
    """The service closed the connection without an answer."""
    GARBAGE = "garbage"
    """The data is not a frame of the lookup service, or not an answer to the request."""
    INVALID = "invalid"
    """An unusable answer: an invalid tree, too many nodes, or the wrong number of drafts."""
    OTHER_TOKENIZER = "other_tokenizer"
    """The drafts have ids of another tokenizer."""
    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class Counters:
    """Totals of one client, shared by its threads; read one with `counters["timeout"]`.

    The outcomes sum to the number of calls. There are also:

        contexts      contexts of these calls
        drafted       contexts with a nonempty draft
        nodes         nodes of all drafts
        connections   connections opened
        pauses        pauses caused by failures
        appended      documents appended to a live store
        lost          documents whose append the service did not confirm
    """

    def __init__(self) -> None:
        """Start from zero."""
        others = ("contexts", "drafted", "nodes", "connections", "pauses", "appended", "lost")
        self._totals = dict.fromkeys((*map(str, Outcome), *others), 0)
        self.renew()

    def renew(self) -> None:
        """Replace the lock: in a forked process, its holder may not exist."""
        self._lock = threading.Lock()

    def failed(self, outcome: Outcome, contexts: int) -> None:
        """Count a call without drafts."""
        with self._lock:
            self._totals[outcome] += 1
            self._totals["contexts"] += contexts

    def answered(self, sizes: Sequence[int]) -> None:
        """Count an answered call with the numbers of nodes of its drafts."""
        with self._lock:
            self._totals["answered"] += 1
            self._totals["contexts"] += len(sizes)
            self._totals["drafted"] += len(sizes) - sizes.count(0)
            self._totals["nodes"] += sum(sizes)

    def add(self, name: str, number: int = 1) -> None:
        """Increase another counter."""
        with self._lock:
            self._totals[name] += number

    def __getitem__(self, name: str) -> int:
        return self._totals[name]

    @property
    def calls(self) -> int:
        """Number of calls of `draft` for at least one node."""
        return sum(map(self.as_dict().__getitem__, Outcome))

    def as_dict(self) -> dict[str, int]:
        """Return all totals by name."""
        with self._lock:
            return dict(self._totals)

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={number}" for name, number in self.as_dict().items() if number)
        return f"Counters({found})"


class Pauses:
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
