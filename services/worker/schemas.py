"""Grammars of requests: schemas compile one at a time, beside everything else, and few wait."""

import asyncio

from starlette.requests import Request

from draftstore.decoding.grammars import Grammar
from draftstore.errors import GrammarError
from services.worker.bodies import AnyBody, ChatBody
from services.worker.engine import Engine
from services.worker.exchange import NOBODY
from services.worker.problems import ApiError

MAX_WAITING = 8
"""Maximum schemas that wait, with the one that is being compiled."""


class Schemas:
    """Compiles the schemas of requests, for the event loop."""

    def __init__(self) -> None:
        self._turn, self._waiting = asyncio.Lock(), 0

    async def grammar(self, body: AnyBody, engine: Engine, http: Request) -> Grammar | None:
        """Return the grammar that an answer must follow, None if there is none; ApiError if it cannot be compiled."""
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        tools = isinstance(body, ChatBody) and body.callable_tools
        for name, given in (
            ("min_tokens", body.min_tokens),
            ("ignore_eos", body.ignore_eos),
            ("tools", tools),
        ):
            if given:
                raise ApiError(400, f"{name} and an answer in JSON exclude each other: omit one", param=name)
        if self._waiting >= MAX_WAITING:
            message = f"{self._waiting} schemas wait to be compiled: try again later"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self._waiting += 1
        try:
            async with self._turn:
                if await http.is_disconnected():
                    raise ApiError(NOBODY, "the client has disconnected")
                schema = wanted.json_schema.schema_ if wanted.json_schema else None
                return await asyncio.wrap_future(engine.grammars.compiling(schema))
        except GrammarError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None
        finally:
            self._waiting -= 1
