"""Balancing connections between workers that listen on the same sockets.

The kernel wakes all workers for every connection, and the fastest takes it: one worker may end up with all of them.
So the worker with the fewest connections accepts at once, and the others leave it a moment to do so.
"""

import asyncio
import errno
import logging
import select
import socket
from collections.abc import Callable, Coroutine, Sequence, Sized
from typing import Any

LOG = logging.getLogger(__name__)

MOMENT = 0.001
"""Seconds that a connection is left to another worker; uvloop has millisecond resolution."""
BUSY_SECONDS = 0.004
"""Seconds after which the other worker counts as busy or hanging."""
AT_ONCE = 16
"""Maximum connections accepted before requests get a turn."""
FULL_PAUSE = 0.1
"""Seconds until the next attempt if the process has no room for another connection."""
SETTLE_SECONDS = 1.0
"""Maximum seconds to wait for connections that are not complete."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        take: Callable[[socket.socket], Coroutine[Any, Any, object]],
        connections: Sized,
        others: Callable[[], Sequence[int]],
    ) -> None:
        """Start accepting; called in the loop's thread or before the loop runs.

        Args:
            loop: event loop of this process.
            listening: bound and listening socket, Unix or TCP.
            take: serves an accepted connection.
            connections: open connections of this process.
            others: returns the number of connections of each other worker.
        """
        self._loop = loop
        self._listening = listening
        self._serve = take
        self._connections = connections
        self._others = others
        self._waits_since: float | None = None
        self._begun: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._poll = select.poll()  # unlike `select`, no limit on descriptor numbers
        self._poll.register(listening, select.POLLIN)
        listening.setblocking(False)
        self._loop.add_reader(listening, self._on_ready)

    def close(self) -> None:
        """Stop accepting; accepted connections go on."""
        if self._timer:
            self._timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    async def settled(self) -> None:
        """Wait until every accepted connection is served, or its client has left; not for slow handshakes."""
        if self._begun:
            await asyncio.wait(self._begun, timeout=SETTLE_SECONDS)

    def _on_ready(self) -> None:
        """Accept waiting connections unless another worker should."""
        for _ in range(AT_ONCE):
            if self._is_for_another() and self._may_wait():
                self._pause(MOMENT)
                return
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break  # another worker was faster, or the client has left
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                LOG.warning("no room for another connection", extra={"error": str(error)})
                self._pause(FULL_PAUSE)
                return
            self._take(accepted)
        self._waits_since = None

    def _is_for_another(self) -> bool:
        """Return True if another worker has fewer connections."""
        others = self._others()
        return bool(others) and len(self._connections) + len(self._begun) > min(others)

    def _may_wait(self) -> bool:
        """Return True if the other worker still has time to accept."""
        now = self._loop.time()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < BUSY_SECONDS

    def _pause(self, seconds: float) -> None:
        """Stop watching the socket for some seconds."""
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        """Watch the socket again."""
        if not self._poll.poll(0):
            self._waits_since = None  # the other worker took it
        self._loop.add_reader(self._listening, self._on_ready)

    def _take(self, accepted: socket.socket) -> None:
        """Serve an accepted connection."""
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(accepted))
        self._begun.add(task)  # the loop holds weak references only
        task.add_done_callback(self._begun.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._serve(accepted)
        except OSError:
            accepted.close()  # the client has left
