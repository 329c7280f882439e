"""The HTTP application of the decoding worker: OpenAI's completions, chats, responses; the model, health, metrics."""

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftstore.decoding.grammars import Grammar
from draftstore.errors import GrammarError
from draftstore.hf.requests import GenerationRequest
from services.common import http
from services.common.http import ProblemError, identify, read_body
from services.common.permissions import Grant, Permissions
from services.worker.answers import Engine
from services.worker.bodies import AnyBody, ChatBody, CompletionBody, StreamOptions, parse
from services.worker.decoder import Decoder
from services.worker.metrics import WorkerMetrics
from services.worker.replies import NO_STORE, NOBODY, Chat, Completion, Exchange, problem_reply
from services.worker.requests import check_model, make_requests, make_terms
from services.worker.responses_body import ResponsesBody
from services.worker.responses_reply import Responses
from services.worker.settings import WorkerSettings

BODY_SECONDS = 30.0
"""Time limit in seconds for a body to arrive."""
Asked: TypeAlias = AnyBody | ResponsesBody
MAX_WAITING = 8
"""Maximum schemas that wait, with the one that is being compiled."""


class Schemas:
    """Compiles the schemas of requests one at a time, beside everything else; few wait."""

    def __init__(self) -> None:
        self._turn, self._waiting = asyncio.Lock(), 0

    async def grammar(self, body: AnyBody, engine: Engine, request: Request) -> Grammar | None:
        """Return the grammar that an answer must follow, if any; ProblemError if it cannot be compiled."""
        form = body.form
        if form is None:
            return None
        for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
            if given:
                message = f"{name} excludes answers in JSON and forced calls of tools: omit one"
                raise ProblemError(400, message, param=name)
        if self._waiting >= MAX_WAITING:
            message = f"{self._waiting} schemas wait to be compiled: try again later"
            raise ProblemError(429, message, code="queue_full", retry_after=1)
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    raise ProblemError(NOBODY, "the client has disconnected")
                return await asyncio.wrap_future(engine.grammars.compiling(form))
        except GrammarError as error:
            param = "tools" if form.functions else "response_format"
            raise ProblemError(400, f"{param}: {error}", param=param) from None
        finally:
            self._waiting -= 1


class WorkerSite:
    """The parts of the HTTP application and its handlers."""

    def __init__(
        self, decoder: Decoder, figures: WorkerMetrics, permissions: Permissions, settings: WorkerSettings
    ) -> None:
        self.permissions = permissions  # of clients; replaced when the token file is reread
        self._decoder, self._figures, self._settings = decoder, figures, settings
        self._since = int(time.time())
        self._schemas = Schemas()
        self._reading = 0  # requests that are being read, which count as waiting

    async def answer(self, request: Request, kind: type[Asked], style: type[Completion]) -> Response:
        """POST /v1/completions, /v1/chat/completions and /v1/responses; the decoder counts answers."""
        settings = self._settings
        try:
            engine = self._decoder.require_model()
            grant = self._grant(request, engine.facts.name)
            data = await read_body(request, settings.body, "send a shorter text", BODY_SECONDS)
            self._decoder.require_room(self._reading)
            self._reading += 1
            try:
                asked, body, requests = await asyncio.to_thread(_read, data, kind, engine, settings)
            finally:
                self._reading -= 1
            if grammar := await self._schemas.grammar(body, engine, request):
                requests = [replace(each, grammar=grammar) for each in requests]
            words = style(engine.facts, asked)
            bearer = grant.name if self.permissions.needs_token else ""
            terms = make_terms(body, engine, words.id, bearer)
            exchange = Exchange(self._decoder, requests, terms, words, request)
        except ProblemError as error:
            self._figures.refused.inc()
            error.param = style.params.get(error.param or "", error.param)
            raise
        if not asked.stream:
            return await exchange.whole()
        options = asked.stream_options or StreamOptions()
        return await exchange.stream(bool(options.include_usage), bool(options.continuous_usage_stats))

    def _grant(self, request: Request, model: str) -> Grant:
        """Return the sender's grant; a token covers a model like a release of that name."""
        grant = identify(request, self.permissions)
        if not grant.allows(model):
            raise ProblemError(403, f"this token is not for {model!r}", code="model_not_allowed")
        return grant

    async def models(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/NAME."""
        facts, name = self._decoder.require_model().facts, request.path_params.get("name")
        self._grant(request, facts.name)
        check_model(name, facts)
        entry: dict[str, Any] = {"id": facts.name, "object": "model", "owned_by": "draftstore"}
        entry |= {"created": self._since, "max_model_len": facts.positions, "drafters": list(facts.drafters)}
        return JSONResponse(entry if name else {"object": "list", "data": [entry]}, headers=NO_STORE)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics. Available during loading; if tokens are in use, only to holders of a token for the model."""
        if self.permissions.needs_token:
            self._grant(request, self._decoder.require_model().facts.name)
        headers = {**NO_STORE, "Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(self._figures.text(), headers=headers)

    async def health(self, _request: Request) -> Response:
        """GET /healthz."""
        well = self._decoder.healthy
        return JSONResponse({"status": "alive" if well else "sick"}, 200 if well else 503, NO_STORE)

    async def ready(self, _request: Request) -> Response:
        """GET /readyz."""
        state = self._decoder.state
        return JSONResponse({"status": state}, 200 if self._decoder.ready else 503, NO_STORE)


def _read(
    data: bytes, kind: type[Asked], engine: Engine, settings: WorkerSettings
) -> tuple[Asked, AnyBody, list[GenerationRequest]]:
    asked = parse(data, kind)
    body = asked.chat() if isinstance(asked, ResponsesBody) else asked
    return asked, body, make_requests(body, engine, settings)


def make_app(site: WorkerSite, hosts: Collection[str] | None = None) -> Starlette:
    """Return the application; `hosts` are its names besides localhost and IP addresses, see `Guard`."""
    completions = partial(site.answer, kind=CompletionBody, style=Completion)
    chats = partial(site.answer, kind=ChatBody, style=Chat)
    responses = partial(site.answer, kind=ResponsesBody, style=Responses)
    return http.make_app(
        [
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/models", site.models),
            Route("/v1/models/{name:path}", site.models),
            Route("/healthz", site.health),
            Route("/health", site.health),  # the engines' name for it, which clients use
            Route("/readyz", site.ready),
            Route("/metrics", site.metrics),
        ],
        problem_reply,
        hosts,
    )
