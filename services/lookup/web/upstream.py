"""The HTTP side's own way to the worker processes: frames over their Unix socket, like any decoder's.

`draftstore.remote.client` turns whatever goes wrong into an empty draft, because a decoder wants to go on. People
want to know what went wrong, so here every refusal is raised, and there is no breaker: each request asks anew.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import LookupServiceError, WireError
from draftstore.remote import wire

DEADLINE = 5.0
"""Seconds that people wait; a decoder would not."""


class RefusedError(LookupServiceError):
    """A worker answered that it will not, or cannot."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServiceAwayError(LookupServiceError):
    """No worker answers."""


class _BrokenError(ServiceAwayError):
    """The connection ended before the answer came: another one may do."""


class Drafted(NamedTuple):
    """What a worker answered, and how long that took."""

    answer: wire.DraftAnswer
    round_trip_us: float


class Upstream:
    """One connection to the workers that all requests share; made when it is needed, replaced when it breaks."""

    def __init__(self, path: str, token: str = "", deadline: float = DEADLINE) -> None:
        """Talk to the workers over a Unix socket.

        Args:
            path: of the socket.
            token: a bearer token that may use every release; empty where none is needed.
            deadline: seconds that a request may take in all.
        """
        self._path = path
        self._token = token
        self._deadline = deadline
        self._link: _Link | None = None
        self._connecting = asyncio.Lock()
        self._ids = itertools.count(1)

    async def draft(
        self, name: str, contexts: NDArray[np.int32], budget: int, min_prob: float, strategy: str = ""
    ) -> Drafted:
        """Ask for drafts; the arguments are those of `wire.DraftRequest`.

        Raises:
            RefusedError: the worker says why not.
            ServiceAwayError: no worker answers, or not with drafts.
        """
        begin = perf_counter()
        payload = await self._ask(
            lambda number: wire.encode_request(number, name, contexts, budget, min_prob, strategy)
        )
        micros = (perf_counter() - begin) * 1e6
        answer = _decoded(wire.decode_answer, payload)
        if len(answer.drafts) != len(contexts):
            raise ServiceAwayError(
                f"asked for {len(contexts)} drafts, a worker answered {len(answer.drafts)}"
            )
        return Drafted(answer, micros)

    async def releases(self) -> list[dict[str, Any]]:
        """Return what is served, as the worker describes it.

        Raises:
            RefusedError: the worker says why not.
            ServiceAwayError: no worker answers.
        """
        document = _decoded(json.loads, await self._ask(lambda i: wire.frame(wire.Operation.RELEASES, i)))
        releases: list[dict[str, Any]] = document["releases"] if isinstance(document, dict) else document
        return releases

    def close(self) -> None:
        """Let go of the connection."""
        if self._link:
            self._link.close()

    async def _ask(self, make: Callable[[int], bytes]) -> bytes:
        """Send a request and return the payload of its answer; a second connection is tried when one breaks."""
        try:
            async with asyncio.timeout(self._deadline):
                try:
                    frame = await (await self._connect()).ask(make, next(self._ids))
                except (
                    _BrokenError
                ):  # a worker was restarted; a question changes nothing, so it may come twice
                    frame = await (await self._connect()).ask(make, next(self._ids))
        except TimeoutError:
            raise ServiceAwayError(
                f"no worker answered within {self._deadline:g} s: try again, and see the log of the service"
            ) from None
        except OSError as error:
            raise ServiceAwayError(f"no worker takes connections ({error}): try again in a moment") from None
        if frame.header.status != wire.Status.OK:
            raise RefusedError(_decoded(lambda data: wire.decode_failure(frame.header, data), frame.payload))
        return frame.payload

    async def _connect(self) -> "_Link":
        async with self._connecting:
            if self._link is None or not self._link.usable:
                loop = asyncio.get_running_loop()
                _, link = await loop.create_unix_connection(_Link, self._path)
                self._link = link
                if self._token:
                    await self._greet(link)
            return self._link

    async def _greet(self, link: "_Link") -> None:
        """Present the token."""
        hello = wire.Operation.HELLO
        frame = await link.ask(lambda i: wire.frame(hello, i, self._token.encode()), next(self._ids))
        if frame.header.status != wire.Status.OK:
            link.close()
            raise ServiceAwayError("the workers do not know the token of the HTTP side: restart the service")


def _decoded(decode: Callable[[bytes], Any], payload: bytes) -> Any:
    try:
        return decode(payload)
    except (WireError, ValueError) as error:
        raise ServiceAwayError(f"a worker gave an answer that cannot be read: {error}") from None


class _Link(asyncio.Protocol):
    """One connection, with the requests that are under way on it."""

    def __init__(self) -> None:
        self.usable = False
        self._buffer = wire.FrameBuffer()
        self._waiting: dict[int, asyncio.Future[wire.Frame]] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note where to write."""
        self._transport = cast(asyncio.Transport, transport)  # those of uvloop are not derived from it
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Hand the answers that have arrived to those who wait; late ones are dropped."""
        try:
            for frame in self._buffer.feed(data):
                if frame.header.flags & wire.CLOSING:
                    self.usable = False  # what is under way is still answered
                future = self._waiting.pop(frame.header.request_id, None)
                if future and not future.done():
                    future.set_result(frame)
        except WireError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell everyone who waits."""
        self.usable = False
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(_BrokenError("a worker went away before it answered: try again"))

    async def ask(self, make: Callable[[int], bytes], number: int) -> wire.Frame:
        """Send one request and wait for its answer."""
        if self._transport is None or self._transport.is_closing():
            raise _BrokenError("a worker went away: try again")
        future: asyncio.Future[wire.Frame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._transport.write(make(number))
            return await future
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """End the connection."""
        self.usable = False
        if self._transport:
            self._transport.close()
