"""The HTTP server: uvicorn, with limits for clients that are slow or send endless headers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 256
"""Maximum open connections; beyond that the answer is 503."""
HEADERS = 32 * 1024
"""Maximum bytes of a request's headers."""
HEAD_SECONDS = 10.0
"""Time limit in seconds for the headers to arrive."""
IDLE_SECONDS = 15


class _Protocol(H11Protocol):
    """A connection that is closed if a request does not complete its headers in time."""

    _stalled = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the periodic check."""
        super().connection_made(transport)
        self._look()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        waits = self.cycle is None or self.cycle.response_complete
        stalls = waits and self.timeout_keep_alive_task is None  # with that task, uvicorn itself closes it
        if stalls and self._stalled:
            self.transport.close()
            return
        self._stalled = stalls
        self.loop.call_later(HEAD_SECONDS, self._look)


class HttpServer(uvicorn.Server):
    """uvicorn inside a process that owns the event loop and the signals."""

    def __init__(self, app: ASGIApp, drain_seconds: float = 1.0) -> None:
        """Serve an application.

        Args:
            app: the application.
            drain_seconds: time for open requests to complete when the server stops.
        """
        config = uvicorn.Config(
            app,
            loop="none",
            http=_Protocol,  # h11: unlike httptools it bounds what a client may send before its headers end
            h11_max_incomplete_event_size=HEADERS,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to the process."""
        yield

    def stop(self) -> None:
        """Accept no more requests and end once the open ones are answered; call in the loop's thread."""
        self.should_exit = True
