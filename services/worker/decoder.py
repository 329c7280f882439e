"""The thread that decodes: it loads the model, takes requests from a bounded queue, and answers one after the other.

Everything of torch happens in this one thread. Requests are handed in, cancelled and answered from the event loop.
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
"""Answers in a row that end in an error, after which the worker calls itself sick."""
LONGEST_WAIT = 60.0
"""Seconds that clients are told to wait at most."""


class DecoderState(enum.Enum):
    """What the decoder does."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class UnwantedError(Exception):
    """Ends the decoding of a text that nobody waits for."""


class Decoder:
    """A model that answers one request at a time, and those that wait for it.

    Attributes:
        state: what it does.
        engine: the model; None until it is loaded.
        failure: why the model could not be loaded.
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
        """Make a decoder; `start` begins.

        Args:
            load: loads the model; called in the decoding thread.
            figures: counts.
            queue: most requests that wait beside the one that is decoded.
            changed: called from the decoding thread when the model is loaded or could not be, when nothing is being
                decoded any more while draining, and at the end.
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
        """Whether requests are taken."""
        return self.state is DecoderState.READY

    @property
    def healthy(self) -> bool:
        """Whether the thread goes on, and does not fail at every request."""
        return self.state is not DecoderState.ENDED and self._failures < MOST_FAILURES

    @property
    def idle(self) -> bool:
        """Whether nothing is decoded and nothing waits."""
        return self._running is None and not self._waiting

    def start(self) -> None:
        """Load the model, then decode."""
        self._thread.start()

    def submit(self, job: DecodingJob) -> None:
        """Queue a request.

        Raises:
            ApiError: the queue is full, or the worker takes no requests now.
        """
        with self._wakeup:
            self.require_room()
            self._waiting.append(job)
            self._wakeup.notify()

    def require_room(self) -> None:
        """Refuse a request that could not be queued now.

        Raises:
            ApiError: the queue is full, or the worker takes no requests now.
        """
        if not self.ready:
            raise self.unavailable()
        if len(self._waiting) >= self._most:
            ahead = self._mean_seconds  # until one of them gets its turn
            raise ApiError(
                429,
                f"the queue is full, {counted(len(self._waiting), 'request')} waiting: try again later",
                code="queue_full",
                retry_after=min(LONGEST_WAIT, ahead),
            )

    def unavailable(self) -> ApiError:
        """Return the error of requests that come while none are taken."""
        loading = self.state is DecoderState.LOADING
        message = "the model is being loaded: try again in a moment" if loading else "the worker is stopping"
        code = "model_loading" if loading else "stopping"
        headers = {} if loading else {"Connection": "close"}
        return ApiError(503, message, code=code, retry_after=5 if loading else 1, headers=headers)

    def cancel(self, job: DecodingJob) -> None:
        """Give a request up: it leaves the queue at once, and its decoding ends with the present forward pass."""
        with self._wakeup:
            job.cancelled = True
            if job not in self._waiting:
                return
            self._waiting.remove(job)
        self._figures.ended(job.endpoint, "cancelled", *_lapse(job), None, Usage(0))
        LOG.info("request cancelled while it waited", extra={"id": job.id, "bearer": job.bearer})

    def drain(self) -> None:
        """Take no more requests, send those that wait away, and end after the one that is being decoded."""
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
        """Break off what is being decoded; its client is told."""
        with self._wakeup:
            if self._running is not None:
                self._running.cancelled = True

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; tells whether it came."""
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
        """Answer nobody any more."""
        with self._wakeup:
            self.state = DecoderState.ENDED
            left = [*self._waiting, *filter(None, [self._running])]
            self._waiting.clear()
            self._running = None
        for job in left:
            job.post(Failed(self.unavailable()))
        self._changed()

    def _next(self) -> DecodingJob | None:
        """Wait for a request; None where there will be no more."""
        with self._wakeup:
            while not self._waiting and self.state is not DecoderState.DRAINING:
                self._wakeup.wait()
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def _answer(self, engine: Engine, job: DecodingJob) -> None:
        """Answer one request, and count it before its last event is posted: whoever has it finds it in the metrics."""
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
        """Decode one request; returns its outcome, and the last that is to be said of it."""

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
        """Count and log a request that was decoded; no text of it."""
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
    """Go on.

    Raises:
        UnwantedError: nobody waits for the answer any more.
    """
    if job.cancelled:
        raise UnwantedError


def _lapse(job: DecodingJob) -> tuple[float, float]:
    seconds = monotonic() - job.created
    return seconds, seconds


def _explain(error: Exception) -> ApiError:
    """Return what a client is told of an error inside: no more than it can do about it, as the rest may be private."""
    if type(error).__name__ == "OutOfMemoryError":
        message = "the device has no memory left for this request: send a shorter one"
        return ApiError(503, message, code="out_of_memory", retry_after=1)
    return ApiError(500, "an error inside the worker: its log says more")
