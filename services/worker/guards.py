"""What stands before every request: the host that was asked for, who asks, and the size of what is sent."""

import asyncio
import logging
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.lookup.permissions import Grant, Permissions
from services.lookup.web.guards import SECURITY, is_own_host
from services.worker.problems import ApiError

LOG = logging.getLogger(__name__)
BODY_SECONDS = 30.0
"""How long a body may take to arrive."""


class Guard:
    """Middleware around everything: refuses foreign hosts, adds headers, turns what nobody expected into a 500."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None = None) -> None:
        """Guard an application.

        Args:
            app: what is guarded.
            hosts: names that the worker goes by beside localhost and addresses; None takes any. Without this, a
                foreign page could point its own name at this machine, and use a worker that is for it alone.
        """
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

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

        host = Headers(scope=scope).get("host", "")
        if self._hosts is not None and not is_own_host(host, self._hosts):
            error = ApiError(
                400, f"this worker does not go by the name {host!r}: use localhost or an address"
            )
            await error.response()(scope, receive, send_guarded)
            return
        try:
            await self._app(scope, receive, send_guarded)
        except ClientDisconnect:
            return  # before its request was whole
        except Exception:
            if started:
                raise  # the server breaks the connection off, so that nobody takes a half for the whole
            LOG.exception("an HTTP request failed", extra={"path": scope["path"]})
            error = ApiError(500, "an error inside the worker: its log says more")
            await error.response()(scope, receive, send_guarded)


def identify(request: Request, permissions: Permissions, model: str) -> Grant:
    """Return what the sender may do.

    Args:
        request: with a bearer token, where one is needed.
        permissions: the tokens that are known.
        model: that is asked for; a token allows it as it allows a release of that name.

    Raises:
        ApiError: a token is missing, unknown, or for something else.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" and token.strip() else None
    grant = permissions.identify(given)
    if grant is None:
        found = "an unknown bearer token" if given else "no bearer token"
        wanted = "send `Authorization: Bearer TOKEN` (OpenAI's clients: api_key), see `draftstore tokens new`"
        realm = {"WWW-Authenticate": 'Bearer realm="draftstore"'}
        raise ApiError(401, f"{found}: {wanted}", code="invalid_api_key", headers=realm)
    if not grant.allows(model):
        raise ApiError(403, f"this token is not for {model!r}", code="model_not_allowed")
    return grant


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request that holds JSON.

    Raises:
        ApiError: another type, longer than `most` bytes, or too slow.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"a body of type {kind or 'unknown'!r}, expected application/json")
    length = request.headers.get("content-length", "0")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            if length.isdigit() and int(length) > most:
                raise _too_long(most)
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise _too_long(most)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return bytes(body)


def _too_long(most: int) -> ApiError:
    headers = {"Connection": "close"}
    return ApiError(
        413, f"a body of more than {most:,} bytes: send a shorter text", code="body_too_long", headers=headers
    )
