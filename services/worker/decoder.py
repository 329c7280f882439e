"""The decoding thread: loads the model, takes requests from a bounded queue, and answers several at a time.

Answers begin as soon as the engine has room for them, between two forward passes, and end independently of each other.

All torch code runs in this thread. Requests are submitted, cancelled and answered from the event loop.
"""

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any, cast

from draftstore.errors import ProbabilityError, counted
from services.worker.answers import Answering, UnwantedError
from services.worker.figures import WorkerMetrics
from services.worker.jobs import Answered, DecodingJob, Failed, Finished
from services.worker.problems import ApiError, explain
from services.worker.work import Engine
from services.worker.writing import EndedError

LOG = logging.getLogger(__name__)
MAX_FAILURES = 3
"""Consecutive failed passes after which the worker reports itself as unhealthy."""
LONGEST_WAIT = 60.0
"""Maximum seconds of `Retry-After`."""


class DecoderState(enum.Enum):
    """State of the decoder."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


class Decoder:
    """A model that decodes several answers at a time, and a queue of waiting requests.

    A request for several answers goes to the end of the queue after each of them: it takes turns with the others. While
    nobody waits, its further answers begin at once.

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
            queue: maximum waiting requests beside those being decoded.
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
        self._more: deque[DecodingJob] = (
            deque()
        )  # begun ones with further answers, which need not wait for a turn
        self._reading = 0  # requests that are being read
        self._running: list[Answering] = []
        self._wakeup = threading.Condition()
        self._failures = 0
        self._mean_seconds = 1.0
        self._thread = threading.Thread(target=self._main, name="decoder", daemon=True)
        self.state = DecoderState.LOADING
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        figures.watch(lambda: len(self._waiting), lambda: len(self._running), lambda: self.ready)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state is DecoderState.READY

    @property
    def healthy(self) -> bool:
        """Whether the thread is running and does not fail on every request."""
        return self.state is not DecoderState.ENDED and self._failures < MAX_FAILURES

    @property
    def idle(self) -> bool:
        """Whether nothing is being decoded or waiting."""
        with self._wakeup:  # a request on its way from one to the other is in neither
            return not self._running and not self._waiting

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
        """Refuse a request that could not be queued or begun now, after `others` that are being read."""
        if not self.ready or self.engine is None:
            raise self.unavailable()
        if len(self._waiting) + others >= self._most + self.engine.room:
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
        """Cancel a request: it leaves the queue at once, and its decoding ends after the current forward pass."""
        with self._wakeup:
            job.cancelled = True
            waited = self._forget(job)
            if not waited or not job.over:
                return
        self._count(job, "cancelled", "request cancelled while it waited")

    def drain(self) -> None:
        """Accept no more requests, refuse those that wait, and end after those that have begun."""
        with self._wakeup:
            if self.state is DecoderState.ENDED:
                return
            self.state = DecoderState.DRAINING
            waiting = [job for job in self._waiting if not job.begun]
            self._waiting = deque(job for job in self._waiting if job.begun)
            self._wakeup.notify()
        for job in waiting:
            self._figures.refused(job.endpoint)
            job.post(Failed(self.unavailable()))

    def hurry(self) -> None:
        """Abort the requests that have begun; their clients get an error."""
        with self._wakeup:
            for job in self._jobs():
                job.cancelled = True
            left = [job for job in self._jobs() if self._forget(job) and job.over]
        for job in left:
            self._count(job, "cancelled", "request cancelled while it waited")
            job.post(Failed(self.unavailable()))

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
            while self._begin(engine):
                self._step(engine)
        finally:
            self._end()
            engine.close()

    def _jobs(self) -> list[DecodingJob]:
        """Return all requests that wait or are being decoded, each once."""
        return list(dict.fromkeys([*self._waiting, *(answer.job for answer in self._running)]))

    def _forget(self, job: DecodingJob) -> bool:
        """Begin no more answers to a request; return whether it could have begun one."""
        for jobs in (self._waiting, self._more):
            if job in jobs:
                jobs.remove(job)
                return True
        return False

    def _end(self) -> None:
        """Refuse all remaining requests."""
        with self._wakeup:
            self.state = DecoderState.ENDED
            left = self._jobs()
            self._waiting.clear()
            self._more.clear()
            self._running.clear()
        for job in left:
            job.post(Failed(self.unavailable()))
        self._changed()

    def _begin(self, engine: Engine) -> bool:
        """Begin as many answers as the engine has room for, after waiting for one; False if there will be no more."""
        with self._wakeup:
            while not self._waiting and not self._running and self.state is not DecoderState.DRAINING:
                self._wakeup.wait()
            if not self._waiting and not self._running:
                return False
            begun: list[Answering] = []
            while (self._waiting or self._more) and len(begun) < engine.room:
                begun.append(Answering((self._waiting or self._more)[0], engine))
                job = (self._waiting or self._more).popleft()
                if job.begun < len(job.requests):
                    self._more.append(job)
            self._running += begun
        for answer in begun:
            try:
                engine.join(answer)
            except Exception as error:  # noqa: BLE001 (of this request alone)
                event = self._result(answer, error)
                self._failures += _is_fault(event)
                self._finish(answer, event)
        return True

    def _step(self, engine: Engine) -> None:
        """Run forward passes, and end the answers that end with them."""
        for answer in [answer for answer in self._running if answer.job.cancelled]:
            engine.leave(answer)
            self._finish(answer, None)
        if not self._running:
            return
        ended = engine.step()
        if engine.last_pass is not None:
            self._figures.passed(*engine.last_pass)
        if not ended:
            return
        answers = [cast(Answering, answer) for answer, _ in ended]
        events = [self._result(answer, error) for answer, (_, error) in zip(answers, ended, strict=True)]
        self._failures = self._failures + 1 if any(map(_is_fault, events)) else 0
        for answer, event in zip(answers, events, strict=True):
            self._finish(answer, event)

    def _finish(self, answer: Answering, event: Answered | ApiError | None) -> None:
        """End an answer."""
        # A failure is counted before the last event is posted, so that clients see it in the metrics.
        job = answer.job
        self._mean_seconds += ((monotonic() - answer.begun) / len(self._running) - self._mean_seconds) / 8
        with self._wakeup:
            self._running.remove(answer)
            job.done += 1
            if isinstance(event, ApiError):
                job.failure, job.cancelled = event, True
            if self._forget(job) and not job.cancelled:
                self._waiting.append(job)
            over = job.over
        complete = over and isinstance(event, Answered) and job.done == len(job.requests) and not job.failure
        if over:
            failed = "failed" if job.failure else "cancelled"
            self._count(job, job.reason if complete else failed, "request decoded")
        if isinstance(event, Answered):
            job.post(event)
            if self._keep and job.record and event.text:
                self._keep(job.record(event))
        if over:
            job.post(Finished(job.usage) if complete else Failed(job.failure or self.unavailable()))

    def _result(self, answer: Answering, error: Exception | None) -> Answered | ApiError | None:
        """Return an answer, or the client's view of why there is none; None where nobody wants it."""
        if error is None or isinstance(error, EndedError):
            try:
                return answer.finish()
            except Exception as failed:  # noqa: BLE001 (reported as all others)
                error = failed
        if isinstance(error, UnwantedError):
            return None
        if isinstance(error, ProbabilityError):
            return ApiError(400, str(error))
        LOG.error("decoding failed", exc_info=error, extra={"id": answer.job.id})
        return explain(error)

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


def _is_fault(event: Answered | ApiError | None) -> bool:
    """Return True if an answer ended by a fault of the engine."""
    return isinstance(event, ApiError) and event.status >= 500
