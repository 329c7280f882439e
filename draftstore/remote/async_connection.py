"""Connections of event loops to the lookup service: one for each loop, with many requests under way."""

import asyncio
import socket
from time import monotonic
from typing import cast

from draftstore.errors import WireError
from draftstore.remote.addresses import Endpoint
from draftstore.remote.connection import Transport, start_connecting
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.protocol import SILENCE, ConnectionState, PreparedRequest, Trouble
from draftstore.remote.wire import Frame

MOST_UNSENT = 4 << 20
"""Bytes of requests that wait until the service reads them; beyond that, requests fail at once."""
SHORTEST_WAIT = 0.001
"""Seconds of the shortest timer. uvloop rounds down to whole milliseconds, and a timer of zero would go off before the
loop looks at its sockets."""


class SharedConnection(Transport):
    """The connection that all tasks of one event loop share, made when it is needed and again when it has gone."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start without a connection; see `Transport`."""
        super().__init__(endpoint, hello, counters)
        self._connection: AsyncConnection | None = None
        self._connecting: asyncio.Task[AsyncConnection] | None = None

    async def ask(self, request: PreparedRequest, end: float) -> Frame:
        """Send a request and return its answer, or a failure that concerns the whole connection.

        Raises:
            Trouble: there is no answer.
        """
        attempt = 1
        while True:
            try:
                connection = self._connection
                if connection is None or not connection.usable:
                    connection = self._connection = await self._connect(end)
                return await connection.ask(request, end)
            except Trouble as trouble:
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
            await asyncio.sleep(0)  # transports close in the next round of the loop

    async def _connect(self, end: float) -> "AsyncConnection":
        """Return a new connection, the same to all who wait for one; it goes on being made after the deadline.

        Raises:
            Trouble: there is none, or not yet.
        """
        task = self._connecting
        if task is None:
            task = self._connecting = asyncio.create_task(self._make())
            task.add_done_callback(self._made)
        await asyncio.wait([task], timeout=max(0.0, end - monotonic()))
        if not task.done():
            raise Trouble(Outcome.TIMEOUT, "the connection is not there yet")
        if task.cancelled():
            raise Trouble(Outcome.UNREACHABLE, "the client is closed")
        return task.result()

    def _made(self, task: "asyncio.Task[AsyncConnection]") -> None:
        """Keep a connection that has been made."""
        self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()

    async def _make(self) -> "AsyncConnection":
        """Make a connection.

        Raises:
            Trouble: nobody listens there, or no more connections are taken.
        """
        loop = asyncio.get_running_loop()
        made, place, connected = start_connecting(self._endpoint)
        try:
            if not connected:
                async with asyncio.timeout(SILENCE):
                    await loop.sock_connect(made, place[1])
            connection = AsyncConnection(loop, self._hello, self._counters)
            connect = loop.create_unix_connection if made.family == socket.AF_UNIX else loop.create_connection
            await connect(lambda: connection, sock=made)
        except OSError as error:
            made.close()
            self._endpoint.failed(place)
            raise Trouble(Outcome.UNREACHABLE, f"no connection: {error}") from error
        except BaseException:
            made.close()
            raise
        self._counters.add("connections")
        return connection


class AsyncConnection(asyncio.Protocol):
    """One connection with many requests under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hello: bytes, counters: Counters) -> None:
        """Get ready to be connected."""
        self._loop = loop
        self._state = ConnectionState(hello, counters)
        self._waiting: dict[int, asyncio.Future[Frame | Trouble]] = {}
        self._full = False
        self._transport: asyncio.Transport | None = None
        self.usable = False
        """Whether another request may be sent."""

    async def ask(self, request: PreparedRequest, end: float) -> Frame:
        """Send a request and return its answer; see `Connection.ask`.

        Raises:
            Trouble: there is no answer.
        """
        if not self.usable or self._transport is None:
            raise Trouble(Outcome.CLOSED, "the service closed the connection")
        now = monotonic()
        if self._full or now >= end:
            self._give_up_if_hopeless(now)
            raise Trouble(Outcome.TIMEOUT, "the service does not read" if self._full else "no time is left")
        self._transport.write(self._state.bytes_of(request))
        self._state.sent(request, now)
        future: asyncio.Future[Frame | Trouble] = self._loop.create_future()
        self._waiting[request.id] = future
        timer = self._loop.call_later(max(end - now, SHORTEST_WAIT), self._expire, request.id)
        try:
            found = await future
        finally:
            timer.cancel()
            del self._waiting[request.id]
        if isinstance(found, Trouble):
            raise found
        return found

    def close(self) -> None:
        """Close it at once; who still waits for an answer is told."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take requests."""
        self._transport = cast("asyncio.Transport", transport)  # that of uvloop is no instance
        self._transport.set_write_buffer_limits(high=MOST_UNSENT)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        """Hand answers to those who wait for them."""
        try:
            for frame in self._state.received(data, monotonic()):
                future = self._waiting.get(frame.header.request_id)
                if self._state.settle(frame, future is not None and not future.done()):
                    if future is not None:
                        future.set_result(frame)
                    else:
                        self._end(frame)  # a failure that concerns the whole connection
        except WireError as error:
            self._end(Trouble(Outcome.GARBAGE, str(error)))
        if self._state.closing:
            self.usable = False
            if all(future.done() for future in self._waiting.values()):
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody that there will be no answer."""
        reason = f"the connection has gone: {exc}" if exc else "the service closed the connection"
        self._end(Trouble(Outcome.CLOSED, reason))

    def pause_writing(self) -> None:
        """Send no more until the service has read what it was sent."""
        self._full = True

    def resume_writing(self) -> None:
        """Send again."""
        self._full = False

    def _expire(self, request_id: int) -> None:
        """End the wait for an answer. A loop that comes late itself takes what has come by now first."""
        self._settle(request_id, Trouble(Outcome.TIMEOUT, "no answer in time"))
        self._give_up_if_hopeless(monotonic())

    def _give_up_if_hopeless(self, now: float) -> None:
        """Use another connection from now on if nothing comes over this one."""
        if self._state.hopeless(now):
            self.close()

    def _end(self, found: Frame | Trouble) -> None:
        """Take no more requests, and answer those under way with what has been found."""
        self.usable = False
        for number in self._waiting:
            self._settle(number, found)
        self.close()

    def _settle(self, request_id: int, found: Frame | Trouble) -> None:
        """Wake whoever waits for an answer."""
        future = self._waiting[request_id]
        if not future.done():
            future.set_result(found)
