"""The response to one request, whole or streamed, as long as the client stays connected."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Send

from draftstore.hf.requests import GenerationRequest
from services.worker.answers import Answer, Answered, Delta, Event, Failed, Terms, Usage
from services.worker.decoder import Decoder
from services.worker.problems import ApiError
from services.worker.replies import ALIVE, DONE, NO_STORE, Completion, dumped, sse

LOG = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 10.0
"""Seconds without events after which a stream starts anyway, and then sends keep-alive comments."""
STALL_SECONDS = 60.0
"""Time limit in seconds for a client to read a chunk of its answer."""
NOBODY = 499
"""Status for a disconnected client, as proxies log it."""


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
        self._events.put_nowait(Failed(ApiError(NOBODY, "the client has disconnected")))

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
        """Return all answers as one response; raises `ApiError` if decoding fails."""
        done: list[Answered] = []
        try:
            while len(done) < len(self._answers):
                match await self._events.get():
                    case Answered() as answer:
                        done.append(answer)
                    case Failed(error):
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
        if isinstance(first, Failed):
            self.close()
            raise first.error
        headers = {**NO_STORE, "X-Accel-Buffering": "no"}
        return EventStream(self._chunks(first, usage, each), headers=headers, media_type="text/event-stream")

    async def _chunks(self, event: Event | None, usage: bool, each: bool) -> AsyncGenerator[bytes, None]:
        style, left = self._style, len(self._answers)

        def figures() -> dict[str, Any]:
            return {"usage": self._usage().public()["usage"] if each else None} if usage else {}

        try:
            for choice in range(left):
                for document in style.first(choice):
                    yield sse(document | figures())
            while True:
                match event:
                    case None:
                        yield ALIVE
                    case Delta() as piece:
                        yield sse(style.delta(piece) | figures())
                    case Answered() as answer:
                        yield sse(style.last(answer) | figures())
                        left -= 1
                    case Failed(error):
                        yield sse(error.body())
                        break
                if not left:
                    if usage:
                        yield sse(style.figures(self._usage()))
                    break
                event = await self._next()
            yield DONE
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
