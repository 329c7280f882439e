"""The response to one request, whole or streamed, as long as the client stays connected."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.worker.decoder import Decoder
from services.worker.jobs import Answered, DecodingJob, Delta, Event, Failed, Finished, Gone
from services.worker.replies import ALIVE, DONE, Completion, dumped, sse

LOG = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 10.0
"""Seconds without events after which a stream starts anyway, and then sends keep-alive comments."""
STALL_SECONDS = 60.0
"""Time limit in seconds for a client to read a chunk of its answer."""
NOBODY = 499
"""Status for a disconnected client, as proxies log it."""


class Events:
    """The decoder's events for one request, read by the event loop."""

    def __init__(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, event: Event) -> None:
        """Post an event; thread-safe, even after the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()

    async def soon(self, seconds: float) -> Event | None:
        """Wait for the next event; None on timeout."""
        try:
            async with asyncio.timeout(seconds):
                return await self._queue.get()
        except TimeoutError:
            return None


class Exchange:
    """A submitted request and the client that waits for its answer."""

    def __init__(
        self, decoder: Decoder, job: DecodingJob, events: Events, words: Completion, request: Request
    ) -> None:
        """Submit a job; it is cancelled if the client disconnects.

        Args:
            decoder: decoder to submit to.
            job: the request.
            events: events of the job.
            words: formats the answer.
            request: HTTP request whose body was read.

        Raises:
            ApiError: the decoder refuses the job.
        """
        decoder.submit(job)
        self._decoder, self._job, self._events, self._words = decoder, job, events, words
        self._watching = asyncio.create_task(self._watch(request.receive))

    async def _watch(self, receive: Receive) -> None:
        """Wait until the client disconnects; it can send nothing else."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._decoder.cancel(self._job)
        self._events.post(Gone())

    def close(self) -> None:
        """Release the request, cancelling it if unfinished."""
        self._watching.cancel()
        self._decoder.cancel(self._job)

    def _drafters(self) -> tuple[str, ...]:
        engine = self._decoder.engine
        return engine.facts.drafters if engine else ()

    async def whole(self) -> Response:
        """Return all answers as one response.

        Raises:
            ApiError: decoding failed.
        """
        answers: list[Answered] = []
        try:
            while True:
                match await self._events.next():
                    case Answered() as answer:
                        answers.append(answer)
                    case Finished(usage):
                        answers.sort(key=lambda answer: answer.index)
                        document = self._words.whole_reply(answers, usage, self._drafters())
                        return Response(dumped(document), headers=_HEADERS, media_type="application/json")
                    case Failed(error):
                        raise error
                    case Gone():
                        return Response(status_code=NOBODY)
        finally:
            self.close()

    async def stream(self, wants_usage: bool) -> Response:
        """Return a streamed response after its first event, so that an earlier error becomes an HTTP error.

        Raises:
            ApiError: decoding failed.
        """
        try:
            first = await self._events.soon(KEEP_ALIVE_SECONDS)
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(first, Failed):
            self.close()
            raise first.error
        return EventStream(self, self._pieces(first, wants_usage))

    async def _pieces(self, event: Event | None, wants_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the stream."""
        for index in range(len(self._job.requests)):
            for document in self._words.first(index):
                yield sse(_with_usage(document, wants_usage))
        while True:
            match event:
                case None:
                    yield ALIVE
                case Delta() as piece:
                    yield sse(_with_usage(self._words.delta(piece), wants_usage))
                case Answered() as answer:
                    yield sse(_with_usage(self._words.last(answer), wants_usage))
                case Finished(usage):
                    if wants_usage:
                        yield sse(self._words.figures(usage, self._drafters()))
                    yield DONE
                    return
                case Failed(error):
                    yield sse(error.body())
                    yield DONE
                    return
                case Gone():
                    return
            event = await self._events.soon(KEEP_ALIVE_SECONDS)


def _with_usage(document: dict[str, object], wants_usage: bool) -> dict[str, object]:
    """Return a chunk with `usage: null` if the client asked for usage."""
    return document | {"usage": None} if wants_usage else document


class EventStream(Response):
    """A streamed response that releases its request however it ends."""

    def __init__(self, exchange: Exchange, pieces: AsyncGenerator[bytes, None]) -> None:
        """Send chunks."""
        super().__init__(headers={**_HEADERS, "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._exchange = exchange
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the response; the exchange watches for a disconnect."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            async with aclosing(self._pieces) as pieces:
                await send(start)
                async for piece in pieces:
                    async with asyncio.timeout(STALL_SECONDS):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            LOG.info("a client does not read its answer: cut off")  # the server closes an unfinished response
        finally:
            self._exchange.close()


_HEADERS = {"Cache-Control": "no-store"}
