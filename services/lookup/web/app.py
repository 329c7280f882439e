"""The HTTP application of the lookup service: drafts in JSON, releases, health, metrics, and a page for people.

It opens no store. Drafts come from the worker processes over their socket, so that an HTTP request costs the workers
as much as any client's request and cannot delay decoders.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftstore.remote import wire
from services.common.guards import ProblemError, bearer_token
from services.common.permissions import Grant, Permissions
from services.lookup.limits import SHARED_BUDGET
from services.lookup.web import openapi, page
from services.lookup.web.drafting import DraftDesk
from services.lookup.web.guards import LookupGuard, problem_response
from services.lookup.web.live import Live
from services.lookup.web.messages import FiguresReply, HealthReply, ReadyReply, ReleaseEntry, ReleasesReply
from services.lookup.web.upstream import RefusedError, ServiceAwayError, Upstream

SAMPLE_SECONDS = 1.0
NO_STORE = {"Cache-Control": "no-store"}


@dataclass
class LookupSite:
    """The parts of the HTTP application.

    Attributes:
        upstream: connection to the workers.
        desk: answers draft requests.
        gate: permissions; replaced when the token file is reread.
        live: live figures.
        metrics: returns the metrics text for Prometheus.
        ready: returns whether drafts are served.
        max_budget: nodes of a draft, for senders whose token names no other limit.
    """

    upstream: Upstream
    desk: DraftDesk
    gate: Permissions
    live: Live
    metrics: Callable[[], bytes]
    ready: Callable[[], ReadyReply]
    max_budget: int = SHARED_BUDGET


def make_app(site: LookupSite, hosts: Collection[str] | None = None) -> Starlette:
    """Return the application.

    Args:
        site: its parts.
        hosts: its names beside localhost and IP addresses; None accepts any, see `guards.LookupGuard`.
    """
    api = _LookupApi(site)
    routes = [
        Route("/", api.page, name="page"),
        Route("/static/{name}", api.static),
        *(Route(at.path, getattr(api, at.name), methods=[at.method.upper()]) for at in openapi.OPERATIONS),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(LookupGuard, hosts=hosts)],
        exception_handlers={
            ProblemError: _on_problem,
            HTTPException: _on_http_error,
            RefusedError: _on_refused,
            ServiceAwayError: _on_away,
        },
        lifespan=api.lifespan,
    )


class _LookupApi:
    """The handlers of all paths."""

    def __init__(self, site: LookupSite) -> None:
        self._site = site
        self._document = openapi.document(site.max_budget)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Read the counters once a second while the application runs."""
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await self._site.upstream.close()
            self._site.desk.close()

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._site.live.sample()

    def _grant(self, request: Request) -> Grant:
        """Return the sender's grant."""
        given = bearer_token(request)
        grant = self._site.gate.identify(given)
        if grant is None:
            found = "an unknown bearer token" if given else "no bearer token"
            wanted = "send `Authorization: Bearer TOKEN` with one from `draftstore tokens new`"
            raise ProblemError(401, f"{found}: {wanted}", {"WWW-Authenticate": 'Bearer realm="draftstore"'})
        return grant

    async def draft(self, request: Request) -> Response:
        """POST /v1/draft."""
        grant = self._grant(request)
        return _reply(await self._site.desk.answer(request, grant))

    async def releases(self, request: Request) -> Response:
        """GET /v1/releases."""
        grant = self._grant(request)
        return _reply(ReleasesReply(releases=await self._served(grant)))

    async def _served(self, grant: Grant) -> list[ReleaseEntry]:
        found = await self._site.upstream.releases()
        return [ReleaseEntry.model_validate(entry) for entry in found if grant.allows(entry["name"])]

    async def figures(self, request: Request) -> Response:
        """GET /v1/figures."""
        reply: FiguresReply = self._site.live.report(self._grant(request).allows)
        return _reply(reply)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        if not self._grant(request).allows("*"):
            raise ProblemError(403, "metrics cover all releases: this needs a token for the release '*'")
        return Response(self._site.metrics(), headers={**NO_STORE, "Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def health(self, _request: Request) -> Response:
        """GET /healthz."""
        return _reply(HealthReply())

    async def ready(self, _request: Request) -> Response:
        """GET /readyz. The status is public; names are shown to those who may see them."""
        reply = self._site.ready()
        grant = self._site.gate.identify(None)
        if grant is None:
            problems = ["not everything is open: the log says more"] if reply.problems else []
            reply = reply.model_copy(update={"releases": [], "problems": problems})
        return _reply(reply, 200 if reply.status == "ready" else 503)

    async def openapi(self, _request: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(self._document)

    async def page(self, _request: Request) -> Response:
        """GET /."""
        grant = self._site.gate.identify(None)
        served: list[ReleaseEntry] = []
        notice = ""
        if grant is not None:
            try:
                served = await self._served(grant)
            except (RefusedError, ServiceAwayError) as error:
                notice = str(error)
        html = page.render(served, wants_token=grant is None, notice=notice, max_budget=self._site.max_budget)
        return Response(html, headers=NO_STORE, media_type="text/html")

    async def static(self, request: Request) -> Response:
        """GET /static/NAME, from memory: request paths never reach the file system."""
        asset = page.ASSETS.get(request.path_params["name"])
        if asset is None:
            raise ProblemError(404, "no such file")
        headers = {"ETag": asset.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        return Response(asset.data, headers=headers, media_type=asset.media)


def _reply(message: BaseModel, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, NO_STORE, "application/json")


async def _on_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error.status, error.message, error.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method, as reported by Starlette."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.url.path}: see /openapi.json",
        405: f"{request.url.path} does not take {request.method}: see /openapi.json",
    }.get(error.status_code, error.detail)
    return problem_response(error.status_code, message, error.headers)


STATUSES = {
    wire.Status.BAD_REQUEST: 400,
    wire.Status.NOT_FOUND: 404,
    wire.Status.TOO_LARGE: 413,
    wire.Status.BUSY: 429,
    wire.Status.UNAVAILABLE: 503,
    # A worker that refuses the HTTP process is misconfigured: not the sender's fault.
    wire.Status.UNAUTHORIZED: 503,
    wire.Status.FORBIDDEN: 503,
}


async def _on_refused(_request: Request, error: Exception) -> Response:
    """Pass on a worker's refusal."""
    assert isinstance(error, RefusedError)
    status = STATUSES.get(error.failure.status, 500)
    wait = {"Retry-After": str(max(1, math.ceil(error.failure.retry_after)))}
    return problem_response(status, error.failure.message, wait if status in openapi.RETRIED else None)


async def _on_away(_request: Request, error: Exception) -> Response:
    return problem_response(503, str(error), {"Retry-After": "1"})
