"""The frame server: connections on one event loop, balanced between workers, with a graceful shutdown.

When a worker dies, its clients move to the others, and its successor would have none. So a worker with more than its
share tells some clients to reconnect, with the same flag that announces a drain.
"""

import asyncio
import socket
import ssl
from collections.abc import Coroutine, Sequence
from math import ceil
from typing import Any

from draftstore.remote.wire import CLOSING, Status
from services.common.permissions import Permissions
from services.lookup.figures.counting import SharedCounters
from services.lookup.frames.accepting import Acceptor
from services.lookup.frames.answering import Answerer
from services.lookup.frames.connection import FrameConnection
from services.lookup.frames.turns import Turns

MAX_HANDSHAKES = 128
"""Maximum clients whose handshake is not complete."""
SHUTDOWN_SECONDS = 1.0
"""Seconds for a client to acknowledge the end of an encrypted connection."""
_LOOK_SECONDS = 0.05
_QUIET_LOOKS = 5
"""Number of checks without data after which a connection is closed when the service stops."""
_CROWDED_LOOKS = 2
"""Number of consecutive checks with too many connections after which a worker releases some."""


class FrameServer(Turns):
    """Serves the frames of one process, on sockets that other processes may share."""

    def __init__(self, answerer: Answerer, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Serve answers, in the running loop or the one given."""
        super().__init__(answerer, loop or asyncio.get_running_loop())
        self.connections: set[FrameConnection] = set()
        self.tls: ssl.SSLContext | None = None
        """Context of TCP connections; None: they are not encrypted."""
        self._acceptors: list[Acceptor] = []
        self._handshakes = 0
        self._crowded = 0

    def share(self, sockets: Sequence[socket.socket], figures: SharedCounters, number: int) -> None:
        """Start accepting connections.

        Args:
            sockets: bound and listening sockets, Unix or TCP.
            figures: counters with the number of connections of each worker.
            number: slot number of this worker.
        """

        def take(accepted: socket.socket) -> Coroutine[Any, Any, object]:
            if self.tls is not None and accepted.family != socket.AF_UNIX:
                return self._take_encrypted(accepted, self.tls)
            return self.loop.connect_accepted_socket(
                lambda: FrameConnection(self, self.connections), accepted
            )

        def others() -> list[int]:
            return figures.connections(besides=number)

        self._acceptors += [
            Acceptor(self.loop, listening, take, self.connections, others) for listening in sockets
        ]

    async def _take_encrypted(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        """Serve a connection after its handshake; without one soon it is cut off."""
        if self._handshakes >= MAX_HANDSHAKES:
            raise ConnectionAbortedError
        self._handshakes += 1
        try:
            await self.loop.connect_accepted_socket(
                lambda: FrameConnection(self, self.connections),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=self.limits.hello_seconds,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        finally:
            self._handshakes -= 1

    def share_out(self, counts: Sequence[int]) -> None:
        """Release connections that other workers have room for; called periodically."""
        for connection in list(self.connections):
            connection.close_if_gone()
        staying = [connection for connection in self.connections if not connection.leaving]
        surplus = len(staying) - ceil(sum(counts) / max(len(counts), 1))
        self._crowded = self._crowded + 1 if surplus > 0 else 0
        if self._crowded >= _CROWDED_LOOKS:
            self._crowded = 0
            for connection in staying[:surplus]:
                connection.leaving = True

    def change_permissions(self, permissions: Permissions) -> None:
        """Apply a changed token file: clients whose token is gone are disconnected."""
        self.answerer.permissions = permissions
        for connection in list(self.connections):
            before = connection.grant
            grant = permissions.identify(None) if before is None else permissions.renew(before)
            if grant is None and before is not None:
                connection.dismiss(Status.UNAUTHORIZED, "this token is no longer known here")
            else:
                connection.change_grant(grant)

    def stop_listening(self) -> None:
        """Stop accepting; other processes that share the sockets still accept."""
        while self._acceptors:
            self._acceptors.pop().close()

    async def drain(self, seconds: float | None = None) -> None:
        """Shut down without losing an answer.

        Open connections go on; answers carry the flag `CLOSING`, which makes clients reconnect elsewhere. Idle
        connections are closed after a moment, all remaining ones after `seconds`.
        """
        self.flags = CLOSING
        acceptors = list(self._acceptors)
        self.stop_listening()
        for acceptor in acceptors:
            await acceptor.settled()
        end = self.loop.time() + (self.limits.drain_seconds if seconds is None else seconds)
        looks: dict[FrameConnection, tuple[int, int]] = {}
        while self.connections and self.loop.time() < end:
            for connection in list(self.connections):
                seen, quiet = looks.get(connection, (-1, 0))
                quiet = quiet + 1 if connection.idle and connection.frames_seen == seen else 0
                looks[connection] = connection.frames_seen, quiet
                if quiet >= _QUIET_LOOKS:
                    connection.close()
            await asyncio.sleep(_LOOK_SECONDS)
        self.close()
        while self.connections:  # transports report their end in a later turn of the loop
            await asyncio.sleep(0)

    def close(self) -> None:
        """Shut down at once."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.transport.abort()
        super().close()
