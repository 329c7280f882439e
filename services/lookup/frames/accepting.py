"""Sharing connections out between workers that listen at the same sockets.

The system wakes all of them for every connection, and whoever is awake first would take it: one worker may end up with
all of them. So the one that has fewer connections takes it, and the others leave it to that one for a moment.

When a worker dies, its clients go to the others, and its successor would have none: so whoever has more than its part
tells some clients to connect anew, by the same flag that tells them of a drain.
"""

import asyncio
import errno
import logging
import select
import socket
from collections.abc import Sequence
from math import ceil

from draftstore.remote.wire import CLOSING
from services.lookup.figures.counting import Figures
from services.lookup.frames.answering import Answerer
from services.lookup.frames.connection import Connection
from services.lookup.frames.server import FrameServer

LOG = logging.getLogger(__name__)

MOMENT = 0.001
"""Seconds that a connection is left to another worker; uvloop counts in milliseconds."""
PATIENCE = 0.004
"""Seconds after which the other one is too busy, or hangs."""
LOOKS = 2
"""A worker with too many connections lets some go after so many looks in a row; a client that was told to go, and is
quiet for so many looks, has gone."""
AT_ONCE = 16
"""Connections that are taken before requests have their turn."""
FULL_PAUSE = 0.1
"""Seconds until another attempt where the process has no room for another connection."""
_FLAGS = 7
"""Where the flags are in a frame."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SharingServer(FrameServer):
    """A server of frames that shares its sockets with the servers of other processes."""

    def __init__(self, answerer: Answerer) -> None:
        """Serve answers; inside the loop."""
        super().__init__(answerer)
        self._acceptors: list[Acceptor] = []
        self._crowded = 0

    def share(self, sockets: Sequence[socket.socket], figures: Figures, number: int) -> None:
        """Take connections from now on.

        Args:
            sockets: bound and listening, Unix or TCP.
            figures: that tell how many connections the others have.
            number: of our own slot.
        """
        self._acceptors = [Acceptor(self, listening, figures, number) for listening in sockets]

    def share_out(self, counts: Sequence[int]) -> None:
        """Let go of connections that others have room for; to be called now and then.

        Args:
            counts: connections of every worker that is ready, our own too.
        """
        shared = [connection for connection in self.connections if isinstance(connection, SharedConnection)]
        for connection in shared:
            connection.close_if_gone()
        staying = [connection for connection in shared if not connection.leaving]
        surplus = len(staying) - ceil(sum(counts) / max(len(counts), 1))
        self._crowded = self._crowded + 1 if surplus > 0 else 0
        if self._crowded >= LOOKS:
            self._crowded = 0
            for connection in staying[:surplus]:
                connection.leaving = True

    def stop_listening(self) -> None:
        """Take no more connections; other processes still do."""
        super().stop_listening()
        while self._acceptors:
            self._acceptors.pop().close()


class SharedConnection(Connection):
    """A connection that may be told to go to another worker."""

    def __init__(self, server: SharingServer) -> None:
        """Serve one client."""
        super().__init__(server)
        self.leaving = False
        self._told = False
        self._seen = self._quiet = 0

    def _write(self, data: bytes) -> None:
        if self.leaving:
            self._told = True
            flags = data[_FLAGS] | CLOSING
            data = b"".join((data[:_FLAGS], bytes([flags]), data[_FLAGS + 1 :]))
        super()._write(data)

    def close_if_gone(self) -> None:
        """Close it once the client was told to go, and is quiet; one that stays is served as before."""
        self._quiet = self._quiet + 1 if self._told and self.idle and self.frames_seen == self._seen else 0
        self._seen = self.frames_seen
        if self._quiet > LOOKS:
            self.close()


class Acceptor:
    """Takes the connections of one socket."""

    def __init__(
        self, server: SharingServer, listening: socket.socket, figures: Figures, number: int
    ) -> None:
        """Begin; see `SharingServer.share`."""
        self._server = server
        self._loop = server.loop
        self._listening = listening
        self._figures = figures
        self._number = number
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
        others = self._figures.connections(besides=self._number)
        return bool(others) and len(self._server.connections) + len(self._begun) > min(others)

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
            await self._loop.connect_accepted_socket(lambda: SharedConnection(self._server), accepted)
        except OSError:
            accepted.close()  # the client has left
