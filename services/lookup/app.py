"""The HTTP application of the lookup service: drafts in JSON, releases, health, metrics, and the web page.

It shares the event loop with decoders, so anything that takes more than a fraction of a millisecond runs in a thread.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from draftstore import __version__
from services.common import http
from services.common.http import ProblemError, identify, read_body
from services.common.permissions import Grant, Permissions
from services.lookup.drafting import DraftService
from services.lookup.following import Releases
from services.lookup.metrics import Figures
from services.lookup.questions import MAX_BODY, Questions

NO_STORE = {"Cache-Control": "no-store"}
PAGE = Path(__file__).parent / "page"
MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_BUDGET = 32
"""Initial limit on the nodes of a draft on the page."""
ADVICE = "send only the last tokens of a text: only they determine the draft"


class Site:
    """The content of the HTTP application; `permissions` change when the token file is reread."""

    def __init__(self, releases: Releases, drafting: DraftService, permissions: Permissions) -> None:
        self.permissions = permissions
        self.stopping = False
        self.max_budget = drafting.limits.shared_budget
        self.live_figures = Figures(drafting.metrics)
        self._releases, self._metrics = releases, drafting.metrics
        self._questions = Questions(drafting)

    def _grant(self, request: Request) -> Grant:
        return identify(request, self.permissions)

    async def draft(self, request: Request) -> Response:
        """POST /v1/draft."""
        grant = self._grant(request)
        body = await read_body(request, MAX_BODY, ADVICE)
        return _reply(await self._questions.answer(body, grant))

    async def releases(self, request: Request) -> Response:
        """GET /v1/releases."""
        return _reply({"releases": self._releases.describe(self._grant(request).allows)})

    async def figures(self, request: Request) -> Response:
        """GET /v1/figures."""
        return _reply(await asyncio.to_thread(self.live_figures.report, self._grant(request).allows))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        if not self._grant(request).allows("*"):
            raise ProblemError(403, "metrics cover all releases: this needs a token for the release '*'")
        text = await asyncio.to_thread(self._metrics.text)
        return _reply(text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def ready(self, _request: Request) -> Response:
        """GET /readyz; a release that cannot be opened does not make the service unready.

        The status is public; names are shown only to clients that may see them.
        """
        names, unopened, failures = self._releases.names, self._releases.unopened, self._releases.failures
        stopping = ["the service is about to stop"] if self.stopping else []
        problems = [f"the release {name!r} is not open" for name in unopened]
        problems += [f"the latest build of {name!r} cannot be opened" for name in names if name in failures]
        if not names and not unopened:
            problems.append("nothing is served yet: publish a release, or start the service with --store")
        ready = bool(names) and not self.stopping
        if self.permissions.identify(None) is None:
            names, problems = [], ["not everything is open: see the log"] if problems else []
        status = "ready" if ready else "not ready"
        reply = {"status": status, "releases": names, "problems": stopping + problems}
        return _reply(reply, 200 if ready else 503)


def render_page(max_budget: int) -> str:
    """Return the page of a service with this limit on the nodes of a draft."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    values = {"version": __version__, "max_budget": max_budget, "budget": min(PAGE_BUDGET, max_budget)}
    for name, value in values.items():
        page = page.replace(f"{{{{ {name} }}}}", str(value))
    return page


def make_app(site: Site, hosts: Collection[str] | None = None) -> Starlette:
    """Return the application; `hosts` are its names besides localhost and IP addresses, see `Guard`."""
    fixed = {
        "/healthz": _reply('{"status":"alive"}'),
        "/": _reply(render_page(site.max_budget), media="text/html"),
    }
    # From memory: request paths never reach the file system.
    for path in sorted((PAGE / "static").iterdir()):
        fixed[f"/static/{path.name}"] = _reply(path.read_bytes(), media=MEDIA[path.suffix])
    routes = [
        Route("/v1/draft", site.draft, methods=["POST"]),
        Route("/v1/releases", site.releases),
        Route("/v1/figures", site.figures),
        Route("/metrics", site.metrics),
        Route("/readyz", site.ready),
        *[Route(path, response, methods=["GET"]) for path, response in fixed.items()],
    ]
    return http.make_app(routes, _problem, hosts, advice=": see docs/service.md")


def _reply(
    content: dict[str, Any] | bytes | str,
    status: int = 200,
    media: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    data = json.dumps(content) if isinstance(content, dict) else content
    return Response(data, status, {**NO_STORE, **(headers or {})}, media)


def _problem(error: ProblemError) -> Response:
    document = {"error": {"status": error.status, "message": error.message}}
    return _reply(document, error.status, headers=error.headers)
