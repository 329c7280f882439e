"""Draft requests over any transport: permissions, lookups on the event loop or in a thread, refusals."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from time import monotonic, perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, counted
from draftstore.remote.wire import AppendRequest, DraftRequest, Failure, Status
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET
from services.common.permissions import Grant
from services.lookup.following import Releases
from services.lookup.metrics import Metrics
from services.lookup.served import ServedLive, Serving
from services.lookup.settings import Limits

LOG = logging.getLogger(__name__)
INLINE_SECONDS = 0.001
"""Maximum estimated seconds of a lookup on the event loop; handing it to a thread takes 60 µs."""
BUSY_SECONDS = 0.01
"""Seconds that a decoder should wait when too many contexts are waiting."""
AGAIN_SECONDS = 1.0
"""Seconds that a decoder should wait after a store could not be read."""
LOG_SECONDS = 1.0
"""Minimum seconds between two log lines about failing lookups."""

Result = TypeVar("Result")


class RequestRefusedError(DraftstoreError):
    """A request that is answered with a failure; counted under a release if it is served."""

    def __init__(self, status: Status, message: str, retry_after: float = 0.0, release: str = "") -> None:
        super().__init__(message)
        self.failure = Failure(status, retry_after, message)
        self.release = release


class Drafted(NamedTuple):
    """The drafts of a request, the store that they come from, and the duration of the lookup in microseconds."""

    served: Serving
    drafts: DraftBatch
    micros: int


class Lookup(NamedTuple):
    """An allowed request and its store."""

    request: DraftRequest
    served: Serving

    @property
    def inline(self) -> bool:
        """Whether it is short enough for the event loop."""
        request, served = self
        seconds = len(request.contexts) * served.pace * max(request.budget / BUDGET, 0.25)
        return seconds <= INLINE_SECONDS and not served.slow


class DraftService:
    """Answers the draft requests of a service, or raises a `RequestRefusedError`."""

    def __init__(self, releases: Releases, metrics: Metrics, limits: Limits) -> None:
        self.metrics = metrics
        self.limits = limits
        self.releases = releases
        self._waiting = 0
        metrics.waiting.set_function(lambda: self._waiting)
        self._logged = -LOG_SECONDS
        cores = len(os.sched_getaffinity(0))
        self._computing = ThreadPoolExecutor(max(1, cores - 1), thread_name_prefix="lookup")
        self._asking = ThreadPoolExecutor(limits.threads, thread_name_prefix="lookup-database")

    def allow(self, request: DraftRequest, grant: Grant, budget: int) -> Lookup:
        """Check a request, and find its store; drafts have at most `budget` nodes unless the grant sets a limit."""
        if not grant.allows(request.name):  # whether or not it exists
            raise RequestRefusedError(
                Status.FORBIDDEN,
                f"the token {grant.name!r} may not use {request.name!r}: see `draftstore tokens`",
            )
        limits, (batch, width) = self.limits, request.contexts.shape
        most = grant.max_budget or budget
        if batch > limits.batch or width > limits.context or request.budget > most:
            raise RequestRefusedError(
                Status.TOO_LARGE,
                f"{counted(batch, 'context')} of {counted(width, 'token')} with a budget of {request.budget}: expected "
                f"at most {limits.batch} contexts of {limits.context} tokens with a budget of {most}",
            )
        try:
            served = self.releases.get(request.name)
        except KeyError:
            message = f"nothing is served under the name {request.name!r}: publish a release of that name"
            raise RequestRefusedError(Status.NOT_FOUND, message) from None
        if request.strategy and request.strategy not in served.strategies:
            known = ", ".join(served.strategies)
            raise RequestRefusedError(
                Status.NOT_FOUND,
                f"{request.name!r} has no strategy {request.strategy!r}: expected one of {known}",
                release=request.name,
            )
        size = served.hidden_size
        if size and request.hidden is not None and request.hidden.shape[1] != size:
            raise RequestRefusedError(
                Status.BAD_REQUEST,
                f"hidden states of {request.hidden.shape[1]:,} numbers, expected {size:,}: {request.name!r} was "
                "built for another model",
                release=request.name,
            )
        return Lookup(request, served)

    def draft(self, lookup: Lookup) -> Drafted:
        """Look a request up in this thread."""
        request, served = lookup
        begin = perf_counter()
        try:
            drafts = served.draft(request)
        except DraftstoreError as error:
            raise self._failed(served, Status.UNAVAILABLE, error) from None
        except Exception as error:  # noqa: BLE001 - one request must not end the others
            raise self._failed(served, Status.INTERNAL, error) from None
        return Drafted(served, drafts, ceil((perf_counter() - begin) * 1e6))

    async def draft_in_thread(
        self, lookup: Lookup, finish: Callable[[Drafted], Result], gone: Callable[[], bool]
    ) -> Result:
        """Look a request up in a thread, which also calls `finish` with the drafts; skip it if the client is `gone`."""
        batch = len(lookup.request.contexts)
        if self._waiting and self._waiting + batch > self.limits.waiting:
            message = f"too many contexts are waiting ({self._waiting:,}): try again later"
            raise RequestRefusedError(Status.BUSY, message, BUSY_SECONDS, lookup.request.name)

        def work() -> Result:
            if gone():
                raise RequestRefusedError(
                    Status.BUSY, "the client has disconnected", release=lookup.request.name
                )
            return finish(self.draft(lookup))

        self._waiting += batch
        try:
            pool = self._asking if lookup.served.slow else self._computing
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._waiting -= batch

    async def append(self, request: AppendRequest, grant: Grant) -> dict[str, Any]:
        """Append documents to a live store, in a thread because the log is on a disk."""
        live = self._live(request.name, grant, change=True)
        found = await self._change(live, partial(live.append, request))
        counts = self.metrics.of(live.name).counts
        counts["appended_tokens"] += sum(len(document.ids) for document in request.documents)
        counts["unlogged_documents"] = live.store.unlogged
        return found

    async def forget(self, name: str, version: int, grant: Grant) -> None:
        """Forget the documents of versions before one in a live store, in a thread."""
        live = self._live(name, grant, change=True)
        await self._change(live, partial(live.store.forget, before=version))

    def recall(self, name: str, prompt: int, count: int, grant: Grant) -> list[NDArray[np.int32]]:
        """Return the latest answers to a prompt in a live store, in this thread."""
        return self._live(name, grant).store.recall(prompt, count)

    def _live(self, name: str, grant: Grant, *, change: bool = False) -> ServedLive:
        """Return a live store that a client may read, or change."""
        if not (grant.may_append(name) if change else grant.allows(name)):
            append = "append to" if change else "use"
            advice = "use `draftstore tokens new` with --append" if change else "see `draftstore tokens`"
            message = f"the token {grant.name!r} may not {append} {name!r}: {advice}"
            raise RequestRefusedError(Status.FORBIDDEN, message)
        if (live := self.releases.live.get(name)) is None:
            raise RequestRefusedError(
                Status.NOT_FOUND, f"no live store {name!r}: `draftstore serve --live {name}` adds it"
            )
        return live

    async def _change(self, live: ServedLive, change: Callable[[], Result]) -> Result:
        """Change a live store in a thread, because its log is on a disk."""
        name = live.name
        try:
            return await asyncio.get_running_loop().run_in_executor(self._asking, change)
        except DraftstoreError as error:
            raise RequestRefusedError(Status.BAD_REQUEST, f"{name!r}: {error}", release=name) from None
        except Exception as error:  # one append must not end the connection
            LOG.exception("an append to %r failed", name)
            message = f"{name!r} cannot be changed; the log of the service says why"
            raise RequestRefusedError(Status.INTERNAL, message, AGAIN_SECONDS, name) from error

    def close(self) -> None:
        """Wait for the lookups in threads and start no more."""
        for pool in (self._computing, self._asking):
            pool.shutdown(cancel_futures=True)

    def _failed(self, served: Serving, status: Status, error: Exception) -> RequestRefusedError:
        """Return the refusal for an error and log the error, rate-limited; clients see no paths or system messages."""
        now = monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            unexpected = error if status == Status.INTERNAL else None
            LOG.error(
                "no drafts from %r: %s", served.name, error or type(error).__name__, exc_info=unexpected
            )
        what = "its store cannot be read now" if status == Status.UNAVAILABLE else "an unexpected error"
        message = f"no drafts from {served.name!r}: {what}; the log of the service says why"
        return RequestRefusedError(status, message, AGAIN_SECONDS, served.name)

    def count(self, drafted: Drafted, request_bytes: int, answer_bytes: int, seconds: float) -> None:
        """Count an answered request."""
        self.metrics.of(drafted.served.name).answer(drafted.drafts, request_bytes, answer_bytes, seconds)

    def count_failure(self, refused: RequestRefusedError) -> None:
        """Count a refusal under its release if it has one, else under none."""
        figures = self.metrics.of(refused.release) if refused.release else self.metrics.nothing
        figures.fail(refused.failure.status)
