"""The HTTP server: uvicorn with the settings of our services."""

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

HEADERS = 32 * 1024
"""Maximum bytes of a request's headers."""
IDLE_SECONDS = 15
"""Seconds after which a connection without a further request is closed."""


class HttpServer(uvicorn.Server):
    """uvicorn inside a process that owns the event loop and the signals; set `should_exit` to stop it."""

    def __init__(self, app: ASGIApp, drain_seconds: float = 1.0) -> None:
        """Serve an application; when the server stops, open requests have `drain_seconds` to complete."""
        config = uvicorn.Config(
            app,
            loop="none",
            http="h11",  # unlike httptools it bounds what a client may send before its headers end
            h11_max_incomplete_event_size=HEADERS,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handling to the process."""
        yield
