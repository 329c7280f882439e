"""The HTTP application of the decoding worker: OpenAI's completions and chats, the model, health, metrics."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from draftstore.hf.requests import GenerationRequest
from services.common.permissions import Permissions
from services.worker.answering import Events, Exchange
from services.worker.asking import check_model, lead_of, make_record, make_requests
from services.worker.decoder import Decoder
from services.worker.figures import WorkerMetrics
from services.worker.guards import WorkerGuard, identify, read_body
from services.worker.jobs import DecodingJob
from services.worker.messages import ChatAsk, CompletionAsk, parse
from services.worker.problems import ApiError
from services.worker.replies import Chat, Completion, model_entry
from services.worker.settings import WorkerSettings
from services.worker.work import Engine

NO_STORE = {"Cache-Control": "no-store"}
THREADS = 2
"""Number of threads for parsing and tokenizing requests."""
LONG = 1 << 16
"""Bytes of a body above which a request is read by a thread of its own kind, so that it delays no short one."""


class WorkerSite:
    """The parts of the HTTP application.

    Attributes:
        decoder: decoder with the model.
        figures: metrics.
        permissions: permissions of clients; replaced when the token file is reread.
        settings: settings of this run.
    """

    def __init__(
        self, decoder: Decoder, figures: WorkerMetrics, permissions: Permissions, settings: WorkerSettings
    ) -> None:
        """Hold the parts."""
        self.decoder = decoder
        self.figures = figures
        self.permissions = permissions
        self.settings = settings


def make_app(site: WorkerSite, hosts: Collection[str] | None = None) -> Starlette:
    """Return the application.

    Args:
        site: its parts.
        hosts: its names beside localhost and IP addresses; None accepts any, see `guards.WorkerGuard`.
    """
    api = _Handlers(site)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/healthz", api.health),
        Route("/readyz", api.ready),
        Route("/metrics", api.metrics),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(WorkerGuard, hosts=hosts)],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
        lifespan=api.lifespan,
    )


class _Handlers:
    """The handlers of all paths."""

    def __init__(self, site: WorkerSite) -> None:
        self._site = site
        self._since = int(time.time())
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-tokenizer")

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Shut the threads down with the application."""
        yield
        for threads in (self._threads, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._counted(request, CompletionAsk, Completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._counted(request, ChatAsk, Chat)

    async def _counted(
        self, request: Request, kind: type[CompletionAsk | ChatAsk], style: type[Completion]
    ) -> Response:
        """Answer, counting requests refused before decoding; the decoder counts the others."""
        try:
            exchange, ask = await self._begin(request, kind, style)
        except ApiError:
            self._site.figures.refused(style.endpoint)
            raise
        return await (exchange.stream(ask.wants_usage) if ask.stream else exchange.whole())

    async def _begin(
        self, request: Request, kind: type[CompletionAsk | ChatAsk], style: type[Completion]
    ) -> tuple[Exchange, CompletionAsk | ChatAsk]:
        """Read a request and submit it to the decoder."""
        engine = self._engine()
        facts, settings = engine.facts, self._site.settings
        grant = identify(request, self._site.permissions, facts.name)
        body = await read_body(request, settings.body)
        loop = asyncio.get_running_loop()
        threads = self._threads if len(body) <= LONG else self._long  # short ones do not wait for long ones
        with self._site.decoder.room():  # before a long prompt is tokenized for nothing
            ask, requests = await loop.run_in_executor(threads, _read, body, kind, engine, settings)
        words, events = style(facts.name, engine.tokenizer), Events()
        job = DecodingJob(
            id=words.id,
            endpoint=style.endpoint,
            requests=requests,
            post=events.post,
            stops=ask.stop,
            lead=lead_of(ask, engine.tokenizer),
            bearer=grant.name if self._site.permissions.needs_token else "",
            record=make_record(ask, engine.tokenizer, facts.name, words.id)
            if settings.response_log
            else None,
        )
        return Exchange(self._site.decoder, job, events, words, request), ask

    def _engine(self) -> Engine:
        """Return the model."""
        decoder = self._site.decoder
        if decoder.engine is None or not decoder.ready:
            raise decoder.unavailable()
        return decoder.engine

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        facts = self._engine().facts
        identify(request, self._site.permissions, facts.name)
        entries = [model_entry(facts, self._since)]
        return JSONResponse({"object": "list", "data": entries}, headers=NO_STORE)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        facts = self._engine().facts
        identify(request, self._site.permissions, facts.name)
        check_model(request.path_params["name"], facts)
        return JSONResponse(model_entry(facts, self._since), headers=NO_STORE)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics. Available during loading; if tokens are in use, only to holders of a token for the model."""
        permissions, engine = self._site.permissions, self._site.decoder.engine
        if engine is not None:
            identify(request, permissions, engine.facts.name)
        elif permissions.needs_token:
            raise self._site.decoder.unavailable()
        return Response(
            self._site.figures.text(), headers={**NO_STORE, "Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def health(self, _request: Request) -> Response:
        """GET /healthz."""
        well = self._site.decoder.healthy
        return JSONResponse({"status": "alive" if well else "sick"}, 200 if well else 503, NO_STORE)

    async def ready(self, _request: Request) -> Response:
        """GET /readyz."""
        state = self._site.decoder.state
        return JSONResponse({"status": state.value}, 200 if self._site.decoder.ready else 503, NO_STORE)


def _read(
    body: bytes, kind: type[CompletionAsk | ChatAsk], engine: Engine, settings: WorkerSettings
) -> tuple[CompletionAsk | ChatAsk, list[GenerationRequest]]:
    """Parse a request; return it and the generation requests."""
    ask = parse(body, kind)
    check_model(ask.model, engine.facts)
    limits = {"most_tokens": settings.max_tokens, "most_choices": settings.max_choices}
    return ask, make_requests(ask, engine, **limits)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method, as reported by Starlette."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.url.path}: there are /v1/chat/completions, /v1/completions, /v1/models",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, headers=error.headers).response()
