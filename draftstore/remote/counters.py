"""Counters of a lookup service client: outcomes of calls, and drafts."""

import enum
import threading
from collections.abc import Sequence


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

    def add(self, name: str) -> None:
        """Increase another counter by one."""
        with self._lock:
            self._totals[name] += 1

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
