"""The asyncio transport to the lookup service: one connection per event loop with concurrent requests."""

import asyncio
import socket
from time import monotonic
from typing import cast

from draftstore.errors import WireError
from draftstore.remote.addresses import Endpoint
from draftstore.remote.connection import start_connecting
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.pool import Transport
from draftstore.remote.protocol import SILENCE, ConnectionState, RequestFailed
from draftstore.remote.requests import PreparedRequest
from draftstore.remote.wire import Frame

MAX_UNSENT = 4 << 20
"""Maximum bytes of unsent requests; beyond that, requests fail at once."""
SHORTEST_WAIT = 0.001
"""Seconds of the shortest timer. uvloop rounds down to whole milliseconds, and a timer of zero would go off before the
loop looks at its sockets."""


class SharedConnection(Transport):
    """The connection shared by all tasks of an event loop, opened on demand and reopened when lost."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start without a connection; see `Transport`."""
        super().__init__(endpoint, hello, counters)
        self._connection: AsyncConnection | None = None
        self._connecting: asyncio.Task[AsyncConnection] | None = None

    async def ask(self, request: PreparedRequest, end: float) -> Frame:
        """Send a request and return its answer, or a failure of the whole connection.

        Raises:
            RequestFailed: no answer arrived.
        """
        attempt = 1
        while True:
            try:
                connection = self._connection
                if connection is None or not connection.usable:
                    connection = self._connection = await self._connect(end)
                return await connection.ask(request, end)
            except RequestFailed as trouble:
                if not self._again(trouble, attempt):
                    raise
            attempt += 1

    async def close(self) -> None:
        """Close the connection."""
        task = self._connecting
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self._connection is not None:
            self._connection.close()
            await asyncio.sleep(0)  # transports close in the next iteration of the loop

    async def _connect(self, end: float) -> "AsyncConnection":
        """Return a new connection, shared by all waiters; connecting continues after the deadline."""
        task = self._connecting
        if task is None:
            task = self._connecting = asyncio.create_task(self._make())
            task.add_done_callback(self._made)
        await asyncio.wait([task], timeout=max(0.0, end - monotonic()))
        if not task.done():
            raise RequestFailed(Outcome.TIMEOUT, "the connection is not there yet")
        if task.cancelled():
            raise RequestFailed(Outcome.UNREACHABLE, "the client is closed")
        return task.result()

    def _made(self, task: "asyncio.Task[AsyncConnection]") -> None:
        """Keep an established connection."""
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()

    async def _make(self) -> "AsyncConnection":
        """Open a connection."""
        loop = asyncio.get_running_loop()
        made, place, connected = start_connecting(self._endpoint)
        try:
            if not connected:
                async with asyncio.timeout(SILENCE):
                    await loop.sock_connect(made, place[1])
            connection = AsyncConnection(loop, self._hello, self._counters)
            if self._endpoint.tls is not None:
                await loop.create_connection(
                    lambda: connection, sock=made, ssl=self._endpoint.tls,
                    server_hostname=self._endpoint.address.host, ssl_handshake_timeout=SILENCE,
                )  # fmt: skip
            else:
                connect = (
                    loop.create_unix_connection if made.family == socket.AF_UNIX else loop.create_connection
                )
                await connect(lambda: connection, sock=made)
        except OSError as error:
            made.close()
            self._endpoint.failed(place)
            raise RequestFailed(Outcome.UNREACHABLE, f"no connection: {error}") from error
        except BaseException:
            made.close()
            raise
        self._counters.add("connections")
        return connection


class AsyncConnection(asyncio.Protocol):
    """One connection with concurrent requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hello: bytes, counters: Counters) -> None:
        """Prepare to be connected."""
        self._loop = loop
        self._state = ConnectionState(hello, counters)
        self._waiting: dict[int, asyncio.Future[Frame | RequestFailed]] = {}
        self._full = False
        self._transport: asyncio.Transport | None = None
        self.usable = False
        """Whether another request may be sent."""

    async def ask(self, request: PreparedRequest, end: float) -> Frame:
        """Send a request and return its answer; see `Connection.ask`.

        Raises:
            RequestFailed: no answer arrived.
        """
        if not self.usable or self._transport is None:
            raise RequestFailed(Outcome.CLOSED, "the service closed the connection")
        now = monotonic()
        if self._full or now >= end:
            self._give_up_if_hopeless(now)
            raise RequestFailed(
                Outcome.TIMEOUT, "the service does not read" if self._full else "no time is left"
            )
        self._transport.write(self._state.bytes_of(request))
        self._state.sent(request, now)
        future: asyncio.Future[Frame | RequestFailed] = self._loop.create_future()
        self._waiting[request.id] = future
        timer = self._loop.call_later(max(end - now, SHORTEST_WAIT), self._expire, request.id)
        try:
            found = await future
        finally:
            timer.cancel()
            del self._waiting[request.id]
        if isinstance(found, RequestFailed):
            raise found
        return found

    def close(self) -> None:
        """Close it at once; waiting requests fail."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start sending requests."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not an instance
        self._transport.set_write_buffer_limits(high=MAX_UNSENT)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Deliver answers to their requests."""
        try:
            for frame in self._state.received(data, monotonic()):
                future = self._waiting.get(frame.header.request_id)
                if self._state.settle(frame, future is not None and not future.done()):
                    if future is not None:
                        future.set_result(frame)
                    else:
                        self._end(frame)  # a failure of the whole connection
        except WireError as error:
            self._end(RequestFailed(Outcome.GARBAGE, str(error)))
        if self._state.closing:
            self.usable = False
            if all(future.done() for future in self._waiting.values()):
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending requests."""
        reason = f"the connection has gone: {exc}" if exc else "the service closed the connection"
        self._end(RequestFailed(Outcome.CLOSED, reason))

    def pause_writing(self) -> None:
        """Pause sending until the service reads."""
        self._full = True

    def resume_writing(self) -> None:
        """Resume sending."""
        self._full = False

    def _expire(self, request_id: int) -> None:
        """Time a request out. If the loop itself is late, it first processes received data."""
        self._settle(request_id, RequestFailed(Outcome.TIMEOUT, "no answer in time"))
        self._give_up_if_hopeless(monotonic())

    def _give_up_if_hopeless(self, now: float) -> None:
        """Stop using this connection if nothing arrives on it."""
        if self._state.hopeless(now):
            self.close()

    def _end(self, found: Frame | RequestFailed) -> None:
        """Accept no more requests and complete the pending ones with `found`."""
        self.usable = False
        for number in self._waiting:
            self._settle(number, found)
        self.close()

    def _settle(self, request_id: int, found: Frame | RequestFailed) -> None:
        """Complete a pending request."""
        future = self._waiting[request_id]
        if not future.done():
            future.set_result(found)
