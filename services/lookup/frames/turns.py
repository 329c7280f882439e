"""Scheduling in one process: connections take turns on the event loop, lookups that wait for a database get threads."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from time import perf_counter
from typing import Protocol

from draftstore.remote.wire import Failure, Status
from services.lookup.frames.answering import Answerer
from services.lookup.frames.jobs import DraftJob

SLICE = 0.0005
"""Seconds that a connection works before others get a turn."""
SLICE_ALONE = 0.01
"""The same while there is no other: a batch in one piece is answered sooner."""
QUEUE_SECONDS = 1.0
"""Seconds after which a lookup that still waits for a thread is refused: its decoder has gone on without it."""


def time_slice(connections: int) -> float:
    """Return how long one of so many connections works before the others get a turn."""
    return SLICE if connections > 1 else SLICE_ALONE


class TurnTaker(Protocol):
    """Something that takes turns: `services.lookup.frames.connection.FrameConnection`."""

    queued: bool

    @property
    def wants_turn(self) -> bool:
        """Whether there is work for a turn."""

    def turn(self) -> None:
        """Work for one time slice."""


class Turns:
    """The scheduler that connections share. Everything except `delegate`d lookups runs in the loop's thread."""

    def __init__(self, answerer: Answerer, loop: asyncio.AbstractEventLoop) -> None:
        """Serve answers with a loop."""
        self.answerer = answerer
        self.limits = answerer.limits
        self.loop = loop
        self.flags = 0
        """Flags of every answer: `CLOSING` once the service is about to stop."""
        self.waiting = 0
        """Contexts that wait for their turn."""
        self._in_flight = 0
        self._queue: deque[TurnTaker] = deque()
        self._threads = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="lookup")

    def count_waiting(self, contexts: int, jobs: int) -> None:
        """Adjust the number of waiting contexts and jobs."""
        self.waiting += contexts
        self._in_flight += jobs
        self.answerer.slot.waiting = self.waiting
        self.answerer.slot.in_flight = self._in_flight

    @property
    def idle(self) -> bool:
        """Whether no connection waits for a turn."""
        return not self._queue

    def enqueue(self, connection: TurnTaker) -> None:
        """Queue a connection for a turn."""
        if not connection.queued:
            connection.queued = True
            self._queue.append(connection)
            if len(self._queue) == 1:
                self.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Let one connection work for a time slice, then return to the loop."""
        connection = self._queue[0]
        try:
            if connection.wants_turn:
                connection.turn()
        finally:
            self._queue.popleft()
            connection.queued = False
            if connection.wants_turn:
                connection.queued = True
                self._queue.append(connection)
            if self._queue:
                self.loop.call_soon(self._next_turn)

    def delegate(self, job: DraftJob, done: Callable[[DraftJob], None]) -> Future[None]:
        """Run a job in a thread and call `done` in the loop afterwards, even if it was cancelled."""

        def tell(_: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                self.loop.call_soon_threadsafe(done, job)

        future = self._threads.submit(_work, job)
        future.add_done_callback(tell)
        return future

    def close(self) -> None:
        """Start no more lookups in threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _work(job: DraftJob) -> None:
    """Run a whole job in a thread, unless it has waited for one too long."""
    if perf_counter() - job.began > QUEUE_SECONDS:
        job.left = 0
        job.failure = Failure(Status.BUSY, QUEUE_SECONDS, "lookups wait for the database: try again later")
    else:
        job.work(job.batch)
