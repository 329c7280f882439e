"""Sharing connections out between workers that listen at the same sockets.

The system wakes all of them for every connection, and whoever is awake first would take it: one worker may end up with
all of them. So the one that has fewer connections takes it, and the others leave it to that one for a moment.
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
"""Seconds that a connection is left to another worker; uvloop counts in milliseconds."""
PATIENCE = 0.004
"""Seconds after which the other one is too busy, or hangs."""
AT_ONCE = 16
"""Connections that are taken before requests have their turn."""
FULL_PAUSE = 0.1
"""Seconds until another attempt where the process has no room for another connection."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Takes the connections of one socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        take: Callable[[socket.socket], Coroutine[Any, Any, object]],
        connections: Sized,
        others: Callable[[], Sequence[int]],
    ) -> None:
        """Begin, in the thread of the loop or before it runs.

        Args:
            loop: of this process.
            listening: bound and listening, Unix or TCP.
            take: serves a connection that was accepted.
            connections: those of this process.
            others: returns how many connections each of the other workers has.
        """
        self._loop = loop
        self._listening = listening
        self._serve = take
        self._connections = connections
        self._others = others
        self._waits_since: float | None = None
        self._begun: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._poll = select.poll()  # takes descriptors of any number, unlike `select`
        self._poll.register(listening, select.POLLIN)
        listening.setblocking(False)
        self._loop.add_reader(listening, self._on_ready)

    def close(self) -> None:
        """Take no more; those that were taken go on."""
        if self._timer:
            self._timer.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()

    def _on_ready(self) -> None:
        """Take the connections that wait, as far as they are ours."""
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
        """Tell whether another worker has fewer connections."""
        others = self._others()
        return bool(others) and len(self._connections) + len(self._begun) > min(others)

    def _may_wait(self) -> bool:
        """Tell whether what waits may wait for the other worker a little longer."""
        now = self._loop.time()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since < PATIENCE

    def _pause(self, seconds: float) -> None:
        """Look again in a moment."""
        self._loop.remove_reader(self._listening)
        self._timer = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        """Go on taking connections."""
        if not self._poll.poll(0):
            self._waits_since = None  # the other one took it
        self._loop.add_reader(self._listening, self._on_ready)

    def _take(self, accepted: socket.socket) -> None:
        """Serve a connection."""
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(accepted))
        self._begun.add(task)  # the loop itself would let it be collected
        task.add_done_callback(self._begun.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._serve(accepted)
        except OSError:
            accepted.close()  # the client has left
