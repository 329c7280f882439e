"""Connections to one service, opened on demand and shared by threads; what all transports do about lost ones."""

from draftstore.remote.addresses import Endpoint
from draftstore.remote.connection import Connection
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.protocol import RequestFailed
from draftstore.remote.requests import PreparedRequest
from draftstore.remote.wire import Frame

MAX_IDLE = 64
"""Maximum number of idle connections."""


class Transport:
    """Access to one service over connections opened on demand; base of both transports."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start without connections.

        Args:
            endpoint: endpoint of the service.
            hello: first frame on every connection; may be empty.
            counters: for connections, retries and late answers.
        """
        self._endpoint = endpoint
        self._hello = hello
        self._counters = counters

    def _again(self, trouble: RequestFailed, attempt: int) -> bool:
        """Return whether to retry a request on a new connection."""
        if trouble.outcome is Outcome.CLOSED:
            again = attempt == 1  # the service may have been replaced
        else:
            again = trouble.outcome is Outcome.UNREACHABLE and attempt < len(self._endpoint)
        if again:
            self._counters.add("retries")
        return again


class ConnectionPool(Transport):
    """Connections for any number of threads; the most recently used idle one is reused first."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start without connections; see `Transport`."""
        super().__init__(endpoint, hello, counters)
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._closed = False

    def begin(self, request: PreparedRequest) -> Connection | None:
        """Connect and send a request as far as that goes without waiting: several services work at once.

        Returns:
            The connection, for `ask` or `give_up`; None if there is none.
        """
        begun, connection = False, None
        try:
            connection = self._take() or self._open()
            begun = connection.begin(request)
        except RequestFailed:
            return None  # `ask` tries again, and says why not
        finally:
            if connection is not None and not begun:
                self._drop(connection)
        return connection if begun else None

    def ask(self, request: PreparedRequest, end: float, begun: Connection | None = None) -> Frame:
        """Send a request, unless it was `begun` on a connection, and return its answer; see `Connection.ask`.

        Raises:
            RequestFailed: no answer arrived.
        """
        attempt = 1
        while True:
            try:
                return self._ask_once(request, end, begun, fresh=attempt > 1)
            except RequestFailed as trouble:
                if not self._again(trouble, attempt):
                    raise
            attempt += 1
            begun = None

    def give_up(self, begun: Connection) -> None:
        """Expect no answer to what was begun."""
        self._drop(begun)

    def close(self) -> None:
        """Close idle connections; those in use are closed when returned."""
        self._closed = True
        while (connection := self._take()) is not None:
            self._drop(connection)

    def abandon(self) -> None:
        """Close all connections in a forked process; the parent's are unaffected."""
        self._idle.clear()
        for connection in list(self._all):
            self._drop(connection)

    def _ask_once(
        self, request: PreparedRequest, end: float, begun: Connection | None, *, fresh: bool
    ) -> Frame:
        """Use the connection where the request was begun, an idle one or a new one; see `Connection.ask`."""
        connection = begun or (None if fresh else self._take())
        if connection is None:
            connection = self._open()
        try:
            return connection.ask(request, end)
        finally:
            self._give(connection)

    def _open(self) -> Connection:
        """Return a new connection; see `Connection`."""
        connection = Connection(self._endpoint, self._hello, self._counters)
        self._all.add(connection)
        return connection

    def _take(self) -> Connection | None:
        """Return an idle connection if there is one; thread-safe."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give(self, connection: Connection) -> None:
        """Keep a usable connection for the next call."""
        if not connection.usable or self._closed or len(self._idle) >= MAX_IDLE:
            self._drop(connection)
        else:
            self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection."""
        self._all.discard(connection)
        connection.close()
