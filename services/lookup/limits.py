"""Limits on one client and on all clients of a worker process."""

import dataclasses

from draftstore.errors import DraftstoreError
from draftstore.remote.wire import MAX_PAYLOAD
from draftstore.trees.frontier import MAX_BUDGET

SHARED_BUDGET = 256
"""Default of the maximum nodes of a tree where others can reach the service."""
_NODE = 7
"""Bytes of a node in its widest form: token, parent, level."""
_DRAFT = 16
"""Bytes of a draft besides its nodes: its column of the table, and the tree's header."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a worker process. Requests beyond a limit are refused; other requests are unaffected.

    Attributes:
        payload: bytes of a request.
        greeting: bytes of a request before the client has presented its token, where tokens are in use.
        batch: contexts per request.
        context: tokens per context.
        budget: nodes per tree, for a client on the Unix socket.
        shared_budget: the same for clients of TCP and HTTP, which others may reach too: a tree of thousands of nodes
            delays everyone behind it. A token may name another limit.
        connections: open connections.
        waiting: contexts that may wait for their turn; beyond that the answer is `BUSY`.
        waiting_each: the same for one connection.
        hello_seconds: time for a client to present its token, where tokens are in use.
        write_buffer: bytes of unsent answers above which reading from the client pauses.
        stall_seconds: time after which a client that reads no answers is disconnected.
        drain_seconds: time for clients to reconnect elsewhere when the service stops.
        threads: concurrent lookups in stores that wait for a database.
    """

    payload: int = 1 << 20
    greeting: int = 4096
    batch: int = 512
    context: int = 4096
    budget: int = MAX_BUDGET
    shared_budget: int = SHARED_BUDGET
    connections: int = 1024
    waiting: int = 4096
    waiting_each: int = 1024
    hello_seconds: float = 5.0
    write_buffer: int = 1 << 20
    stall_seconds: float = 10.0
    drain_seconds: float = 5.0
    threads: int = 8

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise DraftstoreError(f"a limit of {value} for {name!r}: expected more than 0")
        for name, most in (
            ("payload", MAX_PAYLOAD),
            ("batch", 0xFFFF),
            ("context", 0xFFFF),
            ("budget", MAX_BUDGET),
            ("shared_budget", MAX_BUDGET),
        ):
            if getattr(self, name) > most:
                raise DraftstoreError(
                    f"a limit of {getattr(self, name):,} for {name!r}: expected at most {most:,}"
                )
        if self.longest_answer > MAX_PAYLOAD:
            raise DraftstoreError(
                f"{self.batch} contexts of {self.budget} nodes make an answer of {self.longest_answer:,} bytes, and a "
                f"frame has at most {MAX_PAYLOAD:,}: lower the limit of the batch or of the budget"
            )

    @property
    def longest_answer(self) -> int:
        """Size of the longest answer in bytes."""
        return self.batch * (_DRAFT + max(self.budget, self.shared_budget) * _NODE) + 24

    def public(self, budget: int) -> dict[str, int]:
        """Return the limits that a client should know: those of one request, with its own limit of nodes."""
        return {
            "payload": self.payload,
            "batch": self.batch,
            "context": self.context,
            "budget": budget,
        }
