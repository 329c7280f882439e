"""The decoding thread: loads the model, takes requests from a bounded queue, and answers one after the other.

All torch code runs in this thread. Requests are submitted, cancelled and answered from the event loop.
"""

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from draftstore.decoding.loop import Step
from draftstore.errors import ProbabilityError, counted
from draftstore.hf.requests import Likelihood
from services.worker.figures import WorkerMetrics
from services.worker.jobs import Answered, DecodingJob, Delta, Failed, Finished
from services.worker.problems import ApiError
from services.worker.work import Engine
from services.worker.writing import EndedError, Scored, Writing

LOG = logging.getLogger(__name__)
MOST_FAILURES = 3
"""Consecutive failed answers after which the worker reports itself as unhealthy."""
LONGEST_WAIT = 60.0
"""Maximum seconds of `Retry-After`."""


class DecoderState(enum.Enum):
    """State of the decoder."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class UnwantedError(Exception):
    """Ends the decoding of a cancelled request."""


class Decoder:
    """A model that decodes one answer at a time, and a queue of waiting requests.

    A request for several answers goes to the end of the queue after each of them: it takes turns with the others.

    Attributes:
        state: state of the decoder.
        engine: the model; None until it is loaded.
        failure: error from loading the model.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        figures: WorkerMetrics,
        *,
        queue: int,
        changed: Callable[[], None] = lambda: None,
        keep: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        """Prepare a decoder; `start` starts it.

        Args:
            load: loads the model; called in the decoding thread.
            figures: metrics.
            queue: maximum waiting requests beside the one being decoded.
            changed: called in the decoding thread when loading succeeds or fails, when it becomes idle while draining,
                and at the end.
            keep: takes records of finished answers for the response log.
        """
        self._load = load
        self._figures = figures
        self._most = queue
        self._changed = changed
        self._keep = keep
        self._waiting: deque[DecodingJob] = deque()
        self._reading = 0  # requests that are being read
        self._running: DecodingJob | None = None
        self._wakeup = threading.Condition()
        self._failures = 0
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._main, name="decoder", daemon=True)
        self.state = DecoderState.LOADING
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        figures.watch(lambda: len(self._waiting), lambda: self._running is not None, lambda: self.ready)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state is DecoderState.READY

    @property
    def healthy(self) -> bool:
        """Whether the thread is running and does not fail on every request."""
        return self.state is not DecoderState.ENDED and self._failures < MOST_FAILURES

    @property
    def idle(self) -> bool:
        """Whether nothing is being decoded or waiting."""
        return self._running is None and not self._waiting

    def start(self) -> None:
        """Load the model, then start decoding."""
        self._thread.start()

    def submit(self, job: DecodingJob) -> None:
        """Queue a request.

        Raises:
            ApiError: the queue is full, or no requests are accepted now.
        """
        with self._wakeup:
            self._require_room()
            self._waiting.append(job)
            self._wakeup.notify()

    @contextmanager
    def room(self) -> Iterator[None]:
        """Count a request that is being read as one that waits.

        Raises:
            ApiError: it could not be queued, or no requests are accepted now.
        """
        with self._wakeup:
            self._require_room(self._reading)
            self._reading += 1
        try:
            yield
        finally:
            with self._wakeup:
                self._reading -= 1

    def _require_room(self, others: int = 0) -> None:
        """Refuse a request that could not be queued now, or after `others`, the first of which may be decoded.

        Raises:
            ApiError: the queue is full, or no requests are accepted now.
        """
        if not self.ready:
            raise self.unavailable()
        if len(self._waiting) >= self._most or len(self._waiting) + others > self._most:
            ahead = self._mean_seconds  # mean time until a waiting request gets its turn
            raise ApiError(
                429,
                f"the queue is full, {counted(len(self._waiting), 'request')} waiting: try again later",
                code="queue_full",
                retry_after=min(LONGEST_WAIT, ahead),
            )

    def unavailable(self) -> ApiError:
        """Return the error for requests while none are accepted."""
        loading = self.state is DecoderState.LOADING
        message = "the model is being loaded: try again in a moment" if loading else "the worker is stopping"
        code = "model_loading" if loading else "stopping"
        headers = {} if loading else {"Connection": "close"}
        return ApiError(503, message, code=code, retry_after=5 if loading else 1, headers=headers)

    def cancel(self, job: DecodingJob) -> None:
        """Cancel a request: it leaves the queue at once, or its decoding ends after the current forward pass."""
        with self._wakeup:
            job.cancelled = True
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        self._count(job, "cancelled", "request cancelled while it waited")

    def drain(self) -> None:
        """Accept no more requests, refuse those that wait, and end after those that have begun."""
        with self._wakeup:
            if self.state is DecoderState.ENDED:
                return
            self.state = DecoderState.DRAINING
            waiting = [job for job in self._waiting if not job.done]
            self._waiting = deque(job for job in self._waiting if job.done)
            self._wakeup.notify()
        for job in waiting:
            self._figures.refused(job.endpoint)
            job.post(Failed(self.unavailable()))

    def hurry(self) -> None:
        """Abort the requests that have begun; their clients get an error."""
        with self._wakeup:
            for job in (*self._waiting, *filter(None, [self._running])):
                job.cancelled = True

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return whether it ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        """Run in the decoding thread."""
        try:
            self.engine = engine = self._load()
        except BaseException as error:  # noqa: BLE001 (handed to the main thread)
            self.failure = error
            self._end()
            return
        self._figures.describe(engine.facts)
        with self._wakeup:
            if self.state is DecoderState.LOADING:
                self.state = DecoderState.READY
        self._changed()
        try:
            while (job := self._next()) is not None:
                self._answer(engine, job)
        finally:
            self._end()
            engine.close()

    def _end(self) -> None:
        """Refuse all remaining requests."""
        with self._wakeup:
            self.state = DecoderState.ENDED
            left = [*self._waiting, *filter(None, [self._running])]
            self._waiting.clear()
            self._running = None
        for job in left:
            job.post(Failed(self.unavailable()))
        self._changed()

    def _next(self) -> DecodingJob | None:
        """Wait for a request; None if there will be no more."""
        with self._wakeup:
            while not self._waiting and self.state is not DecoderState.DRAINING:
                self._wakeup.wait()
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _answer(self, engine: Engine, job: DecodingJob) -> None:
        """Decode the next answer to a request.

        The request is counted before its last event is posted, so that clients see it in the metrics.
        """
        begin = monotonic()
        if job.waited is None:
            job.waited = begin - job.created
        event = self._decode(engine, job)
        self._mean_seconds += (monotonic() - begin - self._mean_seconds) / 8
        job.done += 1
        with self._wakeup:
            self._running = None
            if isinstance(event, Answered) and not job.over:
                self._waiting.append(job)
        if isinstance(event, Failed):
            self._count(job, "cancelled" if job.cancelled else "failed", "request decoded")
        elif job.over:
            self._count(job, job.reason, "request decoded")
        job.post(event)
        if isinstance(event, Answered):
            if job.over:
                job.post(Finished(job.usage))
            if self._keep and job.record and event.text:
                self._keep(job.record(event))

    def _decode(self, engine: Engine, job: DecodingJob) -> Answered | Failed:
        """Decode one answer; return its last event."""
        number, request = job.done, job.requests[job.done]
        if not number or request.prompt is not job.requests[number - 1].prompt:
            job.usage.prompt_tokens += len(request.prompt)

        def show(text: str, scored: Sequence[Scored]) -> None:
            job.post(Delta(number, text, scored))

        writing = Writing(
            request, engine.facts, engine.tokenizer, show, job.usage, stops=job.stops, lead=job.lead
        )

        def on_step(step: Step, likelihoods: Sequence[Likelihood]) -> None:
            _check_wanted(job)
            writing.take(step, likelihoods)

        try:
            _check_wanted(job)  # before the prefill
            with suppress(EndedError):
                engine.generate(request, on_step)
            writing.finish()
        except UnwantedError:
            return Failed(self.unavailable())
        except ProbabilityError as error:
            return Failed(ApiError(400, str(error)))
        except Exception as error:
            self._failures += 1
            LOG.exception("decoding failed", extra={"id": job.id})
            return Failed(_explain(error))
        finally:
            if job.first is None and writing.first_token is not None:
                job.first = writing.first_token - job.created
        self._failures = 0
        if writing.reason == "length":
            job.reason = "length"
        return Answered(number, writing.text, writing.reason, writing.scored)

    def _count(self, job: DecodingJob, outcome: str, message: str) -> None:
        """Count and log a request, without its text."""
        seconds, usage = monotonic() - job.created, job.usage
        waited = seconds if job.waited is None else job.waited
        self._figures.ended(job.endpoint, outcome, waited, seconds, job.first, usage)
        figures = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        figures |= {"answers": usage.answers, "passes": usage.passes}
        figures |= {"drafted": usage.drafted, "accepted": usage.accepted}
        times = {
            "waited": round(waited, 4),
            "first": job.first and round(job.first, 4),
            "seconds": round(seconds, 4),
        }
        who = {"bearer": job.bearer} if job.bearer else {}
        LOG.info(
            message,
            extra={"id": job.id, "endpoint": job.endpoint, "outcome": outcome, **figures, **times, **who},
        )


def _check_wanted(job: DecodingJob) -> None:
    """Check that the client still waits.

    Raises:
        UnwantedError: the request was cancelled.
    """
    if job.cancelled:
        raise UnwantedError


def _explain(error: Exception) -> ApiError:
    """Return the client's view of an internal error: only what it can act on, since details may be private."""
    if type(error).__name__ == "OutOfMemoryError":
        message = "the device has no memory left for this request: send a shorter one"
        return ApiError(503, message, code="out_of_memory", retry_after=1)
    return ApiError(500, "an error inside the worker: its log says more")
