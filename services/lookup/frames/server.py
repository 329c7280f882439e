"""The server of frames: connections on one event loop, in turn, and a graceful end."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter

from draftstore.remote.wire import CLOSING, Failure, Status
from services.common.permissions import Permissions
from services.lookup.frames.answering import Answerer, Job
from services.lookup.frames.connection import Connection

PATIENCE = 1.0
"""Seconds after which a lookup that still waits for a thread is refused: its decoder has gone on without it."""
_LOOK_SECONDS = 0.05
_QUIET_LOOKS = 5
"""A connection that sent nothing for so many looks is closed when the service stops."""


class FrameServer:
    """Serves the frames of one process. Everything but `delegate`d lookups happens in the thread of the loop."""

    def __init__(self, answerer: Answerer, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Serve answers; inside the loop, or with the loop given."""
        self.answerer = answerer
        self.limits = answerer.limits
        self.loop = loop or asyncio.get_running_loop()
        self.flags = 0
        """Of every answer: `CLOSING` once the service is about to stop."""
        self.waiting = 0
        """Contexts that wait for their turn."""
        self.connections: set[Connection] = set()
        self._slot = answerer.slot
        self._in_flight = 0
        self._turns: deque[Connection] = deque()
        self._servers: list[asyncio.Server] = []
        self._threads = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="lookup")

    async def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Take connections on sockets that are bound, Unix or TCP; other processes may share them."""
        for listening in sockets:
            listening.setblocking(False)
            make = (
                self.loop.create_unix_server
                if listening.family == socket.AF_UNIX
                else self.loop.create_server
            )
            self._servers.append(await make(lambda: Connection(self), sock=listening, backlog=1024))

    def admit(self, connection: Connection) -> bool:
        """Take a connection in; False if there are too many."""
        if len(self.connections) >= self.limits.connections:
            return False
        self.connections.add(connection)
        self._slot.connections = len(self.connections)
        return True

    def forget(self, connection: Connection) -> None:
        """Let go of a connection that has ended."""
        self.connections.discard(connection)
        self._slot.connections = len(self.connections)

    def count_waiting(self, contexts: int, jobs: int) -> None:
        """Count what waits, up or down."""
        self.waiting += contexts
        self._in_flight += jobs
        self._slot.waiting = self.waiting
        self._slot.in_flight = self._in_flight

    def enqueue(self, connection: Connection) -> None:
        """Give a connection a turn, behind those that wait for theirs."""
        if not connection.queued:
            connection.queued = True
            self._turns.append(connection)
            if len(self._turns) == 1:
                self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Let one connection work for a slice of time; then the loop looks at its sockets."""
        connection = self._turns[0]
        try:
            if connection.wants_turn:
                connection.turn()
        finally:
            self._turns.popleft()
            connection.queued = False
            if connection.wants_turn:
                connection.queued = True
                self._turns.append(connection)
            if self._turns:
                self.loop.call_soon(self._next_turn)

    def delegate(self, job: Job, done: Callable[[Job], None]) -> Future[None]:
        """Have a thread do a job, and call `done` in the loop afterwards, also if it is cancelled."""

        def tell(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(done, job)

        future = self._threads.submit(_work, job)
        future.add_done_callback(tell)
        return future

    def change_permissions(self, permissions: Permissions) -> None:
        """Follow a changed file of tokens: who lost a token loses the connection."""
        self.answerer.permissions = permissions
        for connection in list(self.connections):
            before = connection.grant
            grant = permissions.identify(None) if before is None else permissions.renew(before)
            if grant is None and before is not None:
                connection.dismiss(Status.UNAUTHORIZED, "this token is not known here any more")
            else:
                connection.change_grant(grant)

    def stop_listening(self) -> None:
        """Take no more connections; other processes that share the sockets still do."""
        for server in self._servers:
            server.close()
        self._servers.clear()

    async def drain(self, seconds: float | None = None) -> None:
        """End without losing an answer.

        Connections go on; their answers carry the flag `CLOSING`, upon which clients go elsewhere. Those that are
        quiet are closed after a moment, and all that are left after `seconds`.
        """
        self.flags = CLOSING
        self.stop_listening()
        end = self.loop.time() + (self.limits.drain_seconds if seconds is None else seconds)
        looks: dict[Connection, tuple[int, int]] = {}
        while self.connections and self.loop.time() < end:
            for connection in list(self.connections):
                seen, quiet = looks.get(connection, (-1, 0))
                quiet = quiet + 1 if connection.idle and connection.frames_seen == seen else 0
                looks[connection] = connection.frames_seen, quiet
                if quiet >= _QUIET_LOOKS:
                    connection.close()
            await asyncio.sleep(_LOOK_SECONDS)
        self.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        """End at once."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.transport.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _work(job: Job) -> None:
    """Do a whole job in a thread, unless it has waited for one too long."""
    if perf_counter() - job.began > PATIENCE:
        job.left = 0
        job.failure = Failure(Status.BUSY, PATIENCE, "lookups wait for the database: try again later")
    else:
        job.work(job.batch)
