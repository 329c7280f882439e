"""The decoding thread: loads the model, takes requests from a bounded queue, and answers one after the other.

All torch code runs in this thread. Requests are submitted, cancelled and answered from the event loop.
"""

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

from draftstore.decoding.loop import Step
from draftstore.errors import ProbabilityError, counted
from services.worker.figures import WorkerMetrics
from services.worker.jobs import DecodingJob, Delta, Event, Failed, Finished
from services.worker.problems import ApiError
from services.worker.work import Engine
from services.worker.writing import EndedError, Usage, Writing

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
    """A model that answers one request at a time, and a queue of waiting requests.

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
            self.require_room()
            self._waiting.append(job)
            self._wakeup.notify()

    def require_room(self) -> None:
        """Refuse a request that could not be queued now.

        Raises:
            ApiError: the queue is full, or no requests are accepted now.
        """
        if not self.ready:
            raise self.unavailable()
        if len(self._waiting) >= self._most:
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
        self._figures.ended(job.endpoint, "cancelled", *_lapse(job), None, Usage(0))
        LOG.info("request cancelled while it waited", extra={"id": job.id, "bearer": job.bearer})

    def drain(self) -> None:
        """Accept no more requests, refuse those that wait, and end after the one being decoded."""
        with self._wakeup:
            if self.state is DecoderState.ENDED:
                return
            self.state = DecoderState.DRAINING
            waiting = list(self._waiting)
            self._waiting.clear()
            self._wakeup.notify()
        for job in waiting:
            self._figures.refused(job.endpoint)
            job.post(Failed(self.unavailable()))

    def hurry(self) -> None:
        """Abort the request being decoded; its client gets an error."""
        with self._wakeup:
            if self._running is not None:
                self._running.cancelled = True

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
        """Answer one request; it is counted before its last event is posted, so that clients see it in the metrics."""
        waited = monotonic() - job.created
        writing = Writing(
            job.request,
            engine.facts,
            engine.tokenizer,
            lambda text: job.post(Delta(text)),
            stops=job.stops,
            lead=job.lead,
        )
        outcome, last = self._decode(engine, job, writing)
        with self._wakeup:
            self._running = None
        self._count(job, outcome, waited, writing)
        job.post(last)
        if self._keep and job.record and isinstance(last, Finished) and last.text:
            self._keep(job.record(last.text))

    def _decode(self, engine: Engine, job: DecodingJob, writing: Writing) -> tuple[str, Event]:
        """Decode one request; return its outcome and last event."""

        def on_step(step: Step) -> None:
            _check_wanted(job)
            writing.take(step)

        try:
            _check_wanted(job)  # before the prefill
            with suppress(EndedError):
                engine.generate(job.request, on_step)
            writing.finish()
        except UnwantedError:
            return "cancelled", Failed(self.unavailable())
        except ProbabilityError as error:
            return "failed", Failed(ApiError(400, str(error)))
        except Exception as error:
            self._failures += 1
            LOG.exception("decoding failed", extra={"id": job.id})
            return "failed", Failed(_explain(error))
        self._failures = 0
        return writing.reason, Finished(writing.text, writing.reason, writing.usage)

    def _count(self, job: DecodingJob, outcome: str, waited: float, writing: Writing) -> None:
        """Count and log a decoded request, without its text."""
        seconds, usage = monotonic() - job.created, writing.usage
        first = None if writing.first_token is None else writing.first_token - job.created
        self._mean_seconds += (seconds - waited - self._mean_seconds) / 8
        self._figures.ended(job.endpoint, outcome, waited, seconds, first, usage)
        figures = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        figures |= {"passes": usage.passes, "drafted": usage.drafted, "accepted": usage.accepted}
        times = {"waited": round(waited, 4), "first": first and round(first, 4), "seconds": round(seconds, 4)}
        who = {"bearer": job.bearer} if job.bearer else {}
        LOG.info(
            "request decoded",
            extra={"id": job.id, "endpoint": job.endpoint, "outcome": outcome, **figures, **times, **who},
        )


def _check_wanted(job: DecodingJob) -> None:
    """Check that the client still waits.

    Raises:
        UnwantedError: the request was cancelled.
    """
    if job.cancelled:
        raise UnwantedError


def _lapse(job: DecodingJob) -> tuple[float, float]:
    seconds = monotonic() - job.created
    return seconds, seconds


def _explain(error: Exception) -> ApiError:
    """Return the client's view of an internal error: only what it can act on, since details may be private."""
    if type(error).__name__ == "OutOfMemoryError":
        message = "the device has no memory left for this request: send a shorter one"
        return ApiError(503, message, code="out_of_memory", retry_after=1)
    return ApiError(500, "an error inside the worker: its log says more")
