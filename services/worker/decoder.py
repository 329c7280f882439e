"""The decoding thread: loads the model, takes answers from a bounded queue, and decodes several at a time.

Answers begin in order, between two forward passes. A request for several counts as that many. All torch code runs in
this thread; answers are submitted, cancelled and read from the event loop.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Literal

from draftstore.errors import GrammarError, ProbabilityError, counted
from services.common.http import ProblemError
from services.worker.answers import Answer, Answered, EndedError, Engine
from services.worker.metrics import WorkerMetrics

LOG = logging.getLogger(__name__)
MAX_FAILURES = 3
"""Consecutive failed passes after which the worker reports that it is unhealthy."""


class Decoder:
    """A model that decodes several answers at a time, and a queue of waiting ones."""

    def __init__(
        self,
        load: Callable[[], Engine],
        figures: WorkerMetrics,
        queue: int,
        changed: Callable[[], None] = lambda: None,
        keep: Callable[[bytes], None] | None = None,
    ) -> None:
        """Prepare a decoder; once `queue` answers are waiting, it refuses requests.

        The decoding thread calls the functions: to load the model, when `state` has changed, and with lines of finished
        answers for the response log.
        """
        self._load, self._figures, self._most, self._changed, self._keep = load, figures, queue, changed, keep
        self._waiting: deque[Answer] = deque()
        self._running: list[Answer] = []
        self._wakeup = threading.Condition()
        self._failures = 0
        self._thread = threading.Thread(target=self._main, name="decoder", daemon=True)
        self.state: Literal["loading", "ready", "draining", "ended"] = "loading"
        self.engine: Engine | None = None  # the model, once it is loaded
        self.failure: BaseException | None = None  # of loading it
        figures.ready.set_function(lambda: self.ready)

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.state == "ready"

    @property
    def healthy(self) -> bool:
        """Whether the thread is running and does not fail in every pass."""
        return self.state != "ended" and self._failures < MAX_FAILURES

    def start(self) -> None:
        """Load the model, then start decoding."""
        self._thread.start()

    def require_model(self) -> Engine:
        """Return the model; raises `ProblemError` if no requests are accepted now."""
        if not self.ready or self.engine is None:
            raise self._unavailable()
        return self.engine

    def require_room(self, others: int = 0) -> None:
        """Raise `ProblemError` if, after `others`, a request can be neither queued nor begun."""
        if len(self._waiting) + others >= self._most + self.require_model().room:
            message = f"the queue is full, {counted(len(self._waiting), 'answer')} waiting: try again later"
            raise ProblemError(429, message, code="queue_full", retry_after=1)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue the answers to a request; raises `ProblemError` like `require_room`."""
        with self._wakeup:
            self.require_room()
            self._waiting.extend(answers)
            self._wakeup.notify()

    def _unavailable(self) -> ProblemError:
        if self.state == "loading":
            message = "the model is being loaded, or its kernels compiled: try again in a moment"
            return ProblemError(503, message, code="model_loading", retry_after=5)
        headers = {"Connection": "close"}
        return ProblemError(503, "the worker is stopping", code="stopping", retry_after=1, headers=headers)

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Cancel answers: waiting ones leave the queue immediately, others end after the current forward pass."""
        with self._wakeup:
            for answer in answers:
                answer.cancelled = True
            left = [answer for answer in self._waiting if answer.cancelled]
            for answer in left:
                self._waiting.remove(answer)
        for answer in left:
            self._end(answer, self._unavailable())

    def drain(self) -> None:
        """Accept no more requests and end after the accepted ones."""
        with self._wakeup:
            if self.state != "ended":
                self.state = "draining"
            self._wakeup.notify()

    def hurry(self) -> None:
        """Cancel all answers; their clients get an error."""
        with self._wakeup:
            answers = [*self._waiting, *self._running]
        self.cancel(answers)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the thread; return whether it ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            engine = self._load()
        except BaseException as error:  # noqa: BLE001 (handed to the main thread)
            self.failure = error
            self._close()
            return
        self._figures.describe(engine.facts, lambda: len(self._waiting), lambda: len(self._running))
        with self._wakeup:
            self.engine = engine
            if self.state == "loading":
                self.state = "ready"
        self._changed()
        try:
            while self._begin(engine):
                self._step(engine)
        finally:
            self._close()
            engine.close()

    def _close(self) -> None:
        with self._wakeup:
            self.state = "ended"
            left = [*self._waiting, *self._running]
            self._waiting.clear()
            self._running.clear()
        for answer in left:
            answer.post(self._unavailable())
        self._changed()

    def _begin(self, engine: Engine) -> bool:
        """Begin as many answers as there is room for, after waiting for one; False if there will be no more."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._waiting or self._running or self.state == "draining")
            if not self._waiting and not self._running:
                return False
            begun = [self._waiting.popleft() for _ in range(min(len(self._waiting), engine.room))]
            self._running += begun
        for answer in begun:
            answer.waited = monotonic() - answer.created
            try:
                engine.join(answer)
            except Exception as error:  # noqa: BLE001 (it concerns only this answer)
                self._finish([(answer, error)])
        return True

    def _step(self, engine: Engine) -> None:
        for answer in [answer for answer in self._running if answer.cancelled]:
            engine.leave(answer)
            self._finish([(answer, None)])
        if self._running:
            self._finish(engine.step())

    def _finish(self, ended: Sequence[tuple[Answer, Exception | None]]) -> None:
        # Failures are counted before the first event is posted, so that its client already sees them.
        events = [(answer, self._outcome(answer, error)) for answer, error in ended]
        wanted = [event for answer, event in events if not answer.cancelled]
        if any(isinstance(event, ProblemError) and event.status >= 500 for event in wanted):
            self._failures += 1
        elif wanted:
            self._failures = 0
        for answer, event in events:
            with self._wakeup:
                self._running.remove(answer)
            self._end(answer, event)

    def _outcome(self, answer: Answer, error: Exception | None) -> Answered | ProblemError:
        """Return the answer, or an error for the client without details, which may be private."""
        if answer.cancelled:
            return self._unavailable()
        if error is None or isinstance(error, EndedError):
            try:
                return answer.finish()
            except Exception as failed:  # noqa: BLE001 (reported like all others)
                error = failed
        if isinstance(error, ProbabilityError | GrammarError):
            return ProblemError(400, str(error))
        LOG.error("decoding failed", exc_info=error, extra={"id": answer.terms.id})
        if type(error).__name__ == "OutOfMemoryError":
            message = "the device has no memory left for this request: send a shorter one"
            return ProblemError(503, message, code="out_of_memory", retry_after=1)
        return ProblemError(500, "internal error: see the log of the worker")

    def _end(self, answer: Answer, event: Answered | ProblemError) -> None:
        """Count, log and post the end of an answer; the log has none of its text."""
        failed = "abort" if answer.cancelled else "error"
        reason = answer.reason if isinstance(event, Answered) else failed
        seconds, usage, terms = monotonic() - answer.created, answer.usage, answer.terms
        self._figures.ended(answer, reason, seconds)
        names = {"id": terms.id, "choice": answer.choice, "reason": reason}
        tokens = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        drafts = {"passes": usage.passes, "drafted": usage.drafted, "accepted": usage.accepted}
        times = {"waited": answer.waited, "first": answer.first, "seconds": seconds}
        rounded = {name: spent and round(spent, 4) for name, spent in times.items()}
        bearer = {"bearer": terms.bearer} if terms.bearer else {}
        LOG.info("answer ended", extra={**names, **tokens, **drafts, **rounded, **bearer})
        if isinstance(event, Answered):
            self._remember(answer, event)
        answer.post(event)

    def _remember(self, answer: Answer, event: Answered) -> None:
        """Pass a finished answer to the response log and to the live store, under the same digest."""
        if answer.terms.record is None or self.engine is None or not event.text:
            return
        try:
            line, digest = answer.terms.record(event)
            if self._keep:
                self._keep(line)
            self.engine.remember(answer, digest)
        except Exception:  # the answer itself is complete
            LOG.exception("an answer is not remembered", extra={"id": answer.terms.id})
