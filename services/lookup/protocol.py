"""Connections of decoders: each reads frames and writes answers, in order.

A short request is answered in the callback that received it, without an asyncio task: a task takes 40 µs, as much as a
lookup. A longer one is looked up in a thread; those behind it on its connection wait for it.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import cast

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.wire import HEADER, VERSION, Frame, Header, Operation, Status
from services.common.permissions import Grant, Permissions
from services.lookup.drafting import Drafted, DraftService, Lookup, RequestRefusedError

TURN = 16
"""Frames answered before other connections get a turn."""
_NOBODY = Header(0, VERSION, 0, 0, 0, 0)
"""Stands for a header that cannot be read."""


class Connection(asyncio.Protocol):
    """One client."""

    transport: asyncio.Transport

    def __init__(self, clients: "Clients", drafting: DraftService) -> None:
        self.peer = ""  # its address over TCP
        self.grant: Grant | None = None  # until it has presented a token, if one is needed
        self.due: float | None = None  # loop time at which it will have failed to send or read for too long
        self.known = False  # whether it has presented a token or, if none is needed, sent a valid request
        self._clients, self._drafting, self._limits = clients, drafting, drafting.limits
        self._budget = self._limits.budget
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._paused = False  # reading
        self._full = False  # of answers that the client does not read
        self._dismissed = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the clients."""
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        transport.set_write_buffer_limits(high=1)  # otherwise uvloop writes at the end of its iteration
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._budget = self._limits.shared_budget
            self.peer = str((transport.get_extra_info("peername") or [""])[0])  # none if it has left already
        self._wait()
        self.grant = self._clients.permissions.identify(None)
        self._clients.join(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop pending work; a lookup in a thread completes, its result is ignored."""
        self._rest = b""
        if self._task is not None:
            self._task.cancel()
        self._clients.leave(self)

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        self._rest = self._rest + data if self._rest else data
        if not self._paused:
            self._answer()

    def pause_writing(self) -> None:
        """Stop answering a client that does not read its answers."""
        self._full = True
        self._wait()

    def resume_writing(self) -> None:
        """Resume answering."""
        self._full = False
        self.due = None if self.known else self.due
        self._answer()

    def _answer(self) -> None:
        """Answer frames until one is looked up in a thread, the client does not read, or others get a turn."""
        try:
            for _ in range(TURN):
                if self._dismissed or self.transport.is_closing():
                    self._rest = b""
                    return
                if self._task is not None or self._full:
                    # Continued reading detects a client that disconnects.
                    self._read(paused=self._full or len(self._rest) > self._limits.greeting)
                    return
                if (frame := self._next_frame()) is None:
                    self._read(paused=False)
                    return
                self._take(frame)
        except wire.LongFrameError as error:
            self.dismiss(RequestRefusedError(Status.TOO_LARGE, str(error)), error.header)
        except WireError as error:
            self.dismiss(RequestRefusedError(Status.BAD_REQUEST, str(error)))
        else:
            self._read(paused=True)
            self._loop.call_soon(self._answer)

    def _read(self, *, paused: bool) -> None:
        """Pause or resume reading; a client has limited time to send the rest of a frame."""
        if paused != self._paused:
            self._paused = paused
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
        if not paused and self.known and not self._dismissed:
            if not self._rest:
                self.due = None
            elif self.due is None:
                self._wait()

    def _wait(self) -> None:
        self.due = self._loop.time() + self._limits.patience

    def _next_frame(self) -> Frame | None:
        data = self._rest
        if len(data) < HEADER.size:
            return None
        header = wire.read_header(data, self._limits.greeting if self.grant is None else self._limits.payload)
        end = HEADER.size + header.length
        if len(data) < end:
            return None
        self._rest = data[end:]
        return Frame(header, data[HEADER.size : end])

    def _take(self, frame: Frame) -> None:
        began = perf_counter()
        header = frame.header
        try:
            if header.operation == Operation.DRAFT:
                self._draft(frame, began)
            elif header.operation == Operation.HELLO:
                self._greet(frame)
            elif header.operation == Operation.APPEND:
                request = wire.decode_append(frame.payload)
                self._answer_later(header, partial(self._append, header, request, self._enter()))
            elif header.operation == Operation.RECALL:
                answers = self._drafting.recall(*wire.decode_recall(frame.payload), self._enter())
                self.transport.write(wire.encode_answers(header.request_id, answers))
            elif header.operation == Operation.FORGET:
                name, version = wire.decode_forget(frame.payload)
                self._answer_later(header, partial(self._forget, header, name, version, self._enter()))
            elif header.operation == Operation.RELEASES:
                document = {"releases": self._drafting.releases.describe(self._enter().allows)}
                self.transport.write(wire.encode_json(header.operation, header.request_id, document))
            else:
                message = f"operation {header.operation} is unknown: this service speaks version {VERSION}"
                self._refuse(header, RequestRefusedError(Status.BAD_REQUEST, message))
        except WireError as error:
            self._refuse(header, RequestRefusedError(Status.BAD_REQUEST, str(error)))
        except RequestRefusedError as refused:
            if refused.failure.status in (Status.UNAUTHORIZED, Status.BUSY) and not self.known:
                self.dismiss(refused, header)
            else:
                self._refuse(header, refused)

    def _enter(self) -> Grant:
        """Return the client's grant, or refuse it; the first valid request makes it known."""
        if self.grant is None:
            raise RequestRefusedError(
                Status.UNAUTHORIZED, "this service needs a token: `draftstore tokens new` creates one"
            )
        if not self.known:
            self._clients.welcome(self)
            self.known, self.due = True, None
        return self.grant

    def _greet(self, frame: Frame) -> None:
        """Check the token of a client, which has one attempt per connection."""
        header = frame.header
        self.grant = self._clients.permissions.identify(frame.payload)
        if self.grant is None:
            raise RequestRefusedError(Status.UNAUTHORIZED, "this token is not known here")
        limits = self._limits.public(self._enter().max_budget or self._budget)
        document = {"version": VERSION, "limits": limits}
        self.transport.write(wire.encode_json(header.operation, header.request_id, document))

    def _draft(self, frame: Frame, began: float) -> None:
        request = wire.decode_request(frame.payload)
        lookup = self._drafting.allow(request, self._enter(), self._budget)
        if not lookup.inline:
            self._answer_later(frame.header, partial(self._draft_in_thread, frame.header, lookup, began))
            return
        drafted = self._drafting.draft(lookup)
        data = _encode(frame.header.request_id, drafted)
        self.transport.write(data)  # counted while the client wakes up
        self._drafting.count(drafted, len(frame.payload), len(data), perf_counter() - began)

    def _answer_later(self, header: Header, answer: Callable[[], Awaitable[bytes]]) -> None:
        """Write an answer once a thread has made it; what the client sends meanwhile waits."""

        async def write() -> None:
            try:
                self.transport.write(await answer())
            except RequestRefusedError as refused:
                self._refuse(header, refused)
            self._task = None
            self._answer()

        self._task = self._loop.create_task(write())

    async def _append(self, header: Header, request: wire.AppendRequest, grant: Grant) -> bytes:
        document = await self._drafting.append(request, grant)
        return wire.encode_json(header.operation, header.request_id, document)

    async def _forget(self, header: Header, name: str, version: int, grant: Grant) -> bytes:
        await self._drafting.forget(name, version, grant)
        return wire.encode_json(header.operation, header.request_id, {})

    async def _draft_in_thread(self, header: Header, lookup: Lookup, began: float) -> bytes:
        def finish(drafted: Drafted) -> tuple[Drafted, bytes]:
            return drafted, _encode(header.request_id, drafted)

        drafted, data = await self._drafting.draft_in_thread(lookup, finish, self.transport.is_closing)
        self._drafting.count(drafted, header.length, len(data), perf_counter() - began)
        return data

    def _refuse(self, header: Header, refused: RequestRefusedError) -> None:
        self._drafting.count_failure(refused)
        self.transport.write(wire.encode_failure(header.operation, header.request_id, refused.failure))

    def dismiss(self, refused: RequestRefusedError, header: Header = _NOBODY) -> None:
        """Send an error, then close; further input is dropped, since an early close could discard the error."""
        if self._dismissed or self.transport.is_closing():
            return
        self._refuse(header, refused)
        self._dismissed = True
        self._rest = b""
        self._clients.leave(self)
        self._clients.join(self)
        self._wait()
        if self.transport.can_write_eof():  # encrypted connections cannot be half-closed
            self.transport.write_eof()
        self._read(paused=False)

    def change_grant(self, permissions: Permissions) -> None:
        """Apply changed permissions; a client whose token is gone is dismissed."""
        grant = permissions.identify(None) if self.grant is None else permissions.renew(self.grant)
        if grant is None and self.grant is not None:
            self.dismiss(RequestRefusedError(Status.UNAUTHORIZED, "this token is no longer known here"))
        self.grant = grant


class Clients:
    """The connections of a service: of known clients, and of strangers, as many of either as the limit allows.

    No known client is closed to make room for another; of the strangers, the oldest is. `permissions` are those of each
    token.
    """

    def __init__(self, drafting: DraftService, permissions: Permissions) -> None:
        self.permissions = permissions
        self._drafting, self._limits = drafting, drafting.limits
        self._strangers: dict[Connection, None] = {}  # oldest first
        self._known: set[Connection] = set()

    def connect(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self, self._drafting)

    def join(self, connection: Connection) -> None:
        """Add a stranger; beyond the limit, abort the oldest one."""
        self._strangers[connection] = None
        if len(self._strangers) > self._limits.connections:
            oldest = next(iter(self._strangers))
            self.leave(oldest)
            oldest.transport.abort()
        self._count()

    def welcome(self, connection: Connection) -> None:
        """Turn a stranger into a known client, or refuse it if there is no room."""
        most, each = self._limits.connections, self._limits.peer_connections
        if len(self._known) >= most:
            raise RequestRefusedError(Status.BUSY, f"all {most} connections are in use: try again later", 1.0)
        same = sum(known.peer == connection.peer for known in self._known)
        if connection.peer and each is not None and same >= each:
            message = f"all {each} connections of this address are in use: try again later"
            raise RequestRefusedError(Status.BUSY, message, 1.0)
        self._strangers.pop(connection, None)
        self._known.add(connection)

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self._strangers.pop(connection, None)
        self._known.discard(connection)
        self._count()

    def _count(self) -> None:
        self._drafting.metrics.connections.set(len(self._strangers) + len(self._known))

    def _all(self) -> list[Connection]:
        return [*self._strangers, *self._known]

    def close_overdue(self, now: float) -> None:
        """Close connections past their deadline; called every 0.1 s."""
        for connection in self._all():
            if connection.due is not None and now > connection.due:
                connection.transport.abort()

    def change_permissions(self, permissions: Permissions) -> None:
        """Apply a changed token file."""
        self.permissions = permissions
        for connection in self._all():
            connection.change_grant(permissions)

    async def close(self, seconds: float) -> None:
        """Close all connections once written answers are sent or `seconds` have passed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        for connection in self._all():
            connection.transport.close()
        while left := self._all():
            if loop.time() > end:
                for connection in left:
                    connection.transport.abort()
            await asyncio.sleep(0.01)


def _encode(number: int, drafted: Drafted) -> bytes:
    served = drafted.served
    return wire.encode_answer(number, served.build, served.tokenizer, drafted.micros, drafted.drafts)
