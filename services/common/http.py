"""HTTP of the services: uvicorn with their settings, and applications whose errors have one form."""

import asyncio
import ipaddress
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.addresses import ListenAddress
from services.common.permissions import Grant, Permissions

LOG = logging.getLogger(__name__)
HEADERS = 32 * 1024
"""Maximum bytes of a request's headers."""
IDLE_SECONDS = 15
"""Seconds after which a connection without a further request is closed."""
BODY_SECONDS = 5.0
"""Time limit in seconds for a body to arrive."""
REQUESTS = 512
"""Maximum requests in progress; further ones get status 503, except health checks."""
HEALTH = ("/healthz", "/health", "/readyz")
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


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


class ProblemError(Exception):
    """A request that fails with an HTTP error.

    `param` and `code` say what is wrong to programs, as in OpenAI's API; the client should wait `retry_after` seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))


Show: TypeAlias = Callable[[ProblemError], Response]
"""Returns an error in the format of an application."""


def make_app(
    routes: Sequence[BaseRoute], show: Show, hosts: Collection[str] | None, advice: str = ""
) -> Starlette:
    """Return a guarded application; `advice` ends the errors of requests for which there is no route."""

    async def on_problem(_request: Request, error: Any) -> Response:
        return show(error)

    async def on_http_error(request: Request, error: Any) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}{advice}"
        return show(ProblemError(error.status_code, message, error.headers))

    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, show=show, hosts=hosts)],
        exception_handlers={ProblemError: on_problem, HTTPException: on_http_error},
    )


class Guard:
    """Middleware around an application: refuses foreign hosts and too many requests, adds headers, catches errors.

    `hosts` are the names of the service besides localhost and IP addresses, see `own_names`; None accepts any. Else a
    foreign page could point its own name at this machine (DNS rebinding) and read the answers.
    """

    def __init__(self, app: ASGIApp, show: Show, hosts: Collection[str] | None) -> None:
        self._app, self._show = app, show
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
            await send(message)

        self._requests += 1
        try:
            refusal = self._refuse(scope)
            await (refusal or self._app)(scope, receive, send_guarded)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server's shutdown grace period is over
            if not started:
                stopped = ProblemError(503, "the service has stopped")
                await self._show(stopped)(scope, receive, send_guarded)
        except Exception:
            if started:
                raise  # the server drops the connection, so that no client takes a partial body for a complete one
            LOG.exception("an HTTP request failed", extra={"path": scope["path"]})
            failed = ProblemError(500, "internal error: see the log of the service")
            await self._show(failed)(scope, receive, send_guarded)
        finally:
            self._requests -= 1

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        status, retry_after = 400, None
        if "content-length" in headers and "transfer-encoding" in headers:
            message = "a request with both Content-Length and Transfer-Encoding: expected one of them"
        elif scope["http_version"] == "1.0" and "host" not in headers and scope["path"] in HEALTH:
            return None  # as proxies check; a browser names the host
        elif self._hosts is not None and not is_own_host(host, self._hosts):
            message = (
                f"this service does not answer to the name {host!r}: use localhost or an address, or start it with "
                "--allow-host NAME"
            )
        elif self._requests > REQUESTS and scope["path"] not in HEALTH:
            status, retry_after = 503, 1
            message = f"{REQUESTS} requests are being answered: try again in a second"
        else:
            return None
        unread = {"Connection": "close"}  # the body is not read
        return self._show(ProblemError(status, message, unread, retry_after=retry_after))


def own_names(endpoint: ListenAddress, allowed: Collection[str], *, tokens: bool) -> tuple[str, ...] | None:
    """Return the host names that requests may use besides localhost and IP addresses; None: any.

    `allowed` are those named by the operator; `tokens` are needed where a DNS-rebinding page would lack them.
    """
    if tokens and not allowed and not endpoint.is_loopback():
        return None
    return (endpoint.host, *allowed)


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Return True if a Host header names this machine: localhost, any address, or one of `names`."""
    bare = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    bare = bare.lower().removesuffix(".")
    if bare == "localhost" or bare.endswith(".localhost") or bare in names:
        return True
    try:
        ipaddress.ip_address(bare.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def identify(request: Request, permissions: Permissions) -> Grant:
    """Return the sender's grant; ProblemError if the bearer token is missing or unknown."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    grant = permissions.identify(given)
    if grant is None:
        found = "an unknown bearer token" if given else "no bearer token"
        message = f"{found}: send `Authorization: Bearer TOKEN` with one from `draftstore tokens new`"
        raise ProblemError(401, message, {"WWW-Authenticate": 'Bearer realm="draftstore"'})
    return grant


async def read_body(request: Request, most: int, advice: str, seconds: float | None = None) -> bytes:
    """Return the body of a JSON request; ProblemError if it has another type, is too long or arrives too slowly.

    `most` is its maximum size in bytes, and `advice` what to do about a longer one; `seconds` is by default
    `BODY_SECONDS`.
    """
    seconds = BODY_SECONDS if seconds is None else seconds
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ProblemError(415, f"a body of type {kind or 'unknown'!r}, expected application/json")
    if coding := request.headers.get("content-encoding"):
        raise ProblemError(415, f"a body with the encoding {coding!r}: send it without")
    long = ProblemError(413, f"a body of more than {most:,} bytes: {advice}", {"Connection": "close"})
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise long
    except TimeoutError:
        raise ProblemError(408, f"the body did not arrive within {seconds:g} s") from None
    return bytes(body)
