"""The HTTP process's connection to the workers: frames over their Unix socket, as any client sends them.

`draftstore.remote.client` turns every failure into an empty draft, because a decoder must go on. People want to know
what went wrong, so here every failure is raised, and there is no circuit breaker: each request tries again.
"""

import itertools
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import LookupServiceError
from draftstore.remote import wire
from draftstore.remote.addresses import Address, Endpoint
from draftstore.remote.async_connection import SharedConnection
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.protocol import RequestFailed, greeting, read_drafts, read_releases
from draftstore.remote.requests import PreparedRequest, prepare_draft

DEADLINE = 5.0
"""Time limit in seconds, for people; a decoder's is far shorter."""


class RefusedError(LookupServiceError):
    """A worker refused the request."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServiceAwayError(LookupServiceError):
    """No worker answers."""


class Drafted(NamedTuple):
    """A worker's answer, and the time that it took."""

    answer: wire.DraftAnswer
    round_trip_us: float


class Upstream:
    """One connection to the workers, shared by all requests; opened on demand, replaced when it breaks."""

    def __init__(self, path: str, token: str = "", deadline: float = DEADLINE) -> None:
        """Connect nowhere yet.

        Args:
            path: Unix socket of the workers.
            token: bearer token for every release; empty if none is needed.
            deadline: total seconds for a request.
        """
        self._deadline = deadline
        self._connection = SharedConnection(Endpoint(Address(path=path)), greeting(token or None), Counters())
        self._ids = itertools.count(1)

    async def draft(
        self, name: str, contexts: NDArray[np.int32], budget: int, min_prob: float, strategy: str = ""
    ) -> Drafted:
        """Ask for drafts; the arguments are those of `wire.DraftRequest`.

        Raises:
            RefusedError: the worker refused.
            ServiceAwayError: no worker answers, or not with drafts.
            WireError: the arguments do not fit the wire format.
        """
        begin = perf_counter()
        request = prepare_draft(next(self._ids), name, contexts, budget, min_prob, strategy)
        try:
            frame = await self._ask(request)
            micros = (perf_counter() - begin) * 1e6
            return Drafted(read_drafts(request, frame), micros)
        except RequestFailed as trouble:
            raise self._error(trouble) from None

    async def releases(self) -> list[dict[str, Any]]:
        """Return the served stores, as the worker describes them.

        Raises:
            RefusedError: the worker refused.
            ServiceAwayError: no worker answers.
        """
        number = next(self._ids)
        data = wire.frame(wire.Operation.RELEASES, number)
        try:
            return read_releases(
                await self._ask(PreparedRequest(number, data, longest_answer=wire.MAX_PAYLOAD))
            )
        except RequestFailed as trouble:
            raise self._error(trouble) from None

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _ask(self, request: PreparedRequest) -> wire.Frame:
        """Return the answer to a request."""
        answer = await self._connection.ask(request, monotonic() + self._deadline)
        if not answer.header.request_id and answer.header.status == wire.Status.UNAUTHORIZED:
            raise ServiceAwayError("the workers do not know the token of the HTTP side: restart the service")
        return answer

    def _error(self, trouble: RequestFailed) -> LookupServiceError:
        """Return the error to raise for a failure."""
        if trouble.failure is not None:
            return RefusedError(trouble.failure)
        message = {
            Outcome.TIMEOUT: f"no worker answered within {self._deadline:g} s: try again, and see the log of the "
            "service",
            Outcome.UNREACHABLE: f"no worker takes connections ({trouble.__cause__ or trouble}): try again in a moment",
            Outcome.CLOSED: "a worker went away before it answered: try again",
        }.get(trouble.outcome, f"a worker gave an answer that cannot be read: {trouble}")
        return ServiceAwayError(message)
