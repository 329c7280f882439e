"""The reply to one request in OpenAI's format: an error, or answers, whole or streamed while the client stays."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Send

import draftstore
from draftstore.hf.requests import GenerationRequest
from services.common.http import ProblemError
from services.worker.answers import Answer, Answered, Delta, Event, Facts, Terms, Usage
from services.worker.decoder import Decoder

LOG = logging.getLogger(__name__)
NO_STORE = {"Cache-Control": "no-store"}
FINGERPRINT = f"draftstore-{draftstore.__version__}"
DONE = b"data: [DONE]\n\n"
ALIVE = b": the request waits for its turn\n\n"
"""A comment, which clients ignore, to keep the connection alive."""
KEEP_ALIVE_SECONDS = 10.0
"""Seconds without events after which a stream starts anyway, and then sends keep-alive comments."""
STALL_SECONDS = 60.0
"""Time limit in seconds for a client to read a chunk of its answer."""
NOBODY = 499
"""Status for a disconnected client, as proxies log it."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Error types by status; others are `server_error` or `invalid_request_error`."""
CODES = {401: "invalid_api_key", 413: "body_too_long"}
"""Codes for programs of errors that `services.common.http` finds, by status."""


def problem_document(error: ProblemError) -> dict[str, Any]:
    """Return an error as a JSON document."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    code = error.code or CODES.get(error.status)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def problem_reply(error: ProblemError) -> Response:
    """Return an error as a whole reply."""
    body = json.dumps(problem_document(error), ensure_ascii=False).encode(errors="backslashreplace")
    return Response(body, error.status, NO_STORE | error.headers, "application/json")


def sse(document: dict[str, Any]) -> bytes:
    """Return a server-sent event, named by the type of its document, if that has one."""
    name = f"event: {document['type']}\n".encode() if "type" in document else b""
    return name + b"data: " + dumped(document) + b"\n\n"


def dumped(document: dict[str, Any]) -> bytes:
    """Return a document as JSON bytes; lone surrogates are escaped."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


class Completion:
    """The format of `/v1/completions`."""

    prefix = "cmpl"
    whole = piece = "text_completion"
    done = DONE
    """The end of a stream."""
    params: Mapping[str, str] = {}
    """Names of parameters, by those of chats and completions, where they differ."""

    def __init__(self, facts: Facts, _body: Any = None) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._facts = facts
        self._created = int(time.time())

    def reply(self, answers: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return all answers."""
        ordered = sorted(answers, key=lambda answer: answer.choice)
        choices = [_choice(each.choice, self._message(each), each.reason) for each in ordered]
        return self._document(self.whole, choices, usage)

    def opening(self, _choices: int) -> list[dict[str, Any]]:
        """Return the events of a stream before the text of its answers."""
        return []

    def delta(self, piece: Delta) -> list[dict[str, Any]]:
        """Return the events of a piece of an answer."""
        return [self._chunk(piece.choice, {"text": piece.text})]

    def last(self, answer: Answered) -> list[dict[str, Any]]:
        """Return the events of the end of an answer."""
        return [self._chunk(answer.choice, {"text": ""}, answer.reason)]

    def closing(self, usage: Usage, wanted: bool) -> list[dict[str, Any]]:
        """Return the events after all answers; `wanted`: with their figures."""
        return [self._document(self.piece, [], usage)] if wanted else []

    def failure(self, error: ProblemError) -> list[dict[str, Any]]:
        """Return the events of an error."""
        return [problem_document(error)]

    def _message(self, answer: Answered) -> dict[str, Any]:
        return {"text": answer.content}

    def _chunk(self, choice: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._document(self.piece, [_choice(choice, content, reason)])

    def _document(self, kind: str, choices: Sequence[Any], usage: Usage | None = None) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._facts.name}
        figures = usage.public() if usage else {}
        return {**head, "system_fingerprint": FINGERPRINT, "choices": choices, **figures}


class Chat(Completion):
    """The format of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Return the role of each answer."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(choice, first) for choice in range(choices)]

    def delta(self, piece: Delta) -> list[dict[str, Any]]:
        """Return the events of a piece of an answer."""
        return [self._chunk(piece.choice, {"delta": {"content": piece.text}})]

    def last(self, answer: Answered) -> list[dict[str, Any]]:
        """Return the last chunk of an answer, with the calls of tools."""
        calls = [{"index": index, **call} for index, call in enumerate(answer.calls)]
        return [self._chunk(answer.choice, {"delta": {"tool_calls": calls} if calls else {}}, answer.reason)]

    def _message(self, answer: Answered) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.content, "refusal": None}
        calls = {"content": answer.content or None, "tool_calls": answer.calls} if answer.calls else {}
        return {"message": {**message, **calls}}


def _choice(choice: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": choice, **content, "logprobs": None, "finish_reason": reason}


class Exchange:
    """The answers to a request, and the client that waits for them."""

    def __init__(
        self,
        decoder: Decoder,
        requests: list[GenerationRequest],
        terms: Terms,
        style: Completion,
        http: Request,
    ) -> None:
        """Submit an answer for each of `requests`; those for the same prompt share its array."""
        self._decoder, self._style = decoder, style
        self._prompts = len({id(request.prompt) for request in requests})
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._answers = [Answer(*numbered, terms, self._post) for numbered in enumerate(requests)]
        decoder.submit(self._answers)
        self._watching = asyncio.create_task(self._watch(http.receive))

    def _post(self, event: Event) -> None:
        """Post an event; called from the decoding thread, even after the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._decoder.cancel(self._answers)
        self._events.put_nowait(ProblemError(NOBODY, "the client has disconnected"))

    def close(self) -> None:
        """Release the request, cancelling what is unfinished."""
        self._watching.cancel()
        self._decoder.cancel(self._answers)

    async def _next(self) -> Event | None:
        """Wait for the next event; None if none comes for a while."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                return await self._events.get()
        except TimeoutError:
            return None

    def _usage(self) -> Usage:
        """Return the figures of all answers; a prompt with several answers counts once."""
        usage = sum((answer.usage for answer in self._answers), Usage())
        usage.prompt_tokens //= len(self._answers) // self._prompts
        return usage

    async def whole(self) -> Response:
        """Return all answers as one response; raises `ProblemError` if decoding fails."""
        done: list[Answered] = []
        try:
            while len(done) < len(self._answers):
                match await self._events.get():
                    case Answered() as answer:
                        done.append(answer)
                    case ProblemError() as error:
                        raise error
        finally:
            self.close()
        body = dumped(self._style.reply(done, self._usage()))
        return Response(body, headers=NO_STORE, media_type="application/json")

    async def stream(self, usage: bool, each: bool) -> Response:
        """Return a streamed response after its first event, so that an earlier error becomes an HTTP error.

        With `usage`, it ends with the figures; with `each`, too, every chunk has those so far.
        """
        first = await self._next()
        if isinstance(first, ProblemError):
            self.close()
            raise first
        headers = {**NO_STORE, "X-Accel-Buffering": "no"}
        return EventStream(self._chunks(first, usage, each), headers=headers, media_type="text/event-stream")

    async def _chunks(self, event: Event | None, usage: bool, each: bool) -> AsyncGenerator[bytes, None]:
        style, left = self._style, len(self._answers)

        def shown(documents: Sequence[dict[str, Any]]) -> list[bytes]:
            figures = {"usage": self._usage().public()["usage"] if each else None} if usage else {}
            return [sse(document | figures) for document in documents]

        try:
            for chunk in shown(style.opening(left)):
                yield chunk
            while True:
                match event:
                    case None:
                        chunks = [ALIVE]
                    case Delta() as piece:
                        chunks = shown(style.delta(piece))
                    case Answered() as answer:
                        chunks = shown(style.last(answer))
                        left -= 1
                    case ProblemError() as error:
                        chunks, left = [sse(document) for document in style.failure(error)], -1
                if not left:
                    chunks += [sse(document) for document in style.closing(self._usage(), usage)]
                for chunk in chunks:
                    yield chunk
                if left <= 0:
                    break
                event = await self._next()
            if style.done:
                yield style.done
        finally:
            self.close()


class EventStream(StreamingResponse):
    """A stream that ends when its client disconnects or stops reading."""

    async def stream_response(self, send: Send) -> None:
        """Send the chunks."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_SECONDS):
                await send(message)

        try:
            await super().stream_response(send_in_time)
        except TimeoutError:
            LOG.info("a client does not read its answer: cut off")  # the server closes an unfinished response
