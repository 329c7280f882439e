"""Draft requests that were allowed: what those of one kind have in common, and the lookup and the answer of each.

    job = DraftJob(kind, request_id, contexts, began)
    while job.left:
        job.work(rows)                      # all contexts, or some at a time
    data = job.encode(flags)
    job.count(len(data))

A job keeps its store to the end, so that no answer mixes builds.
"""

import logging
from math import ceil
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError
from draftstore.remote.repeats import FixedBytes
from draftstore.remote.wire import (
    HEADER,
    DraftRequest,
    EncodedDrafts,
    Failure,
    Frame,
    Operation,
    Status,
    encode_drafts,
    encode_failure,
    join_answer,
)
from services.common.permissions import Grant
from services.lookup.figures.counting import ReleaseCounters
from services.lookup.stores.served import ServedStore

LOG = logging.getLogger(__name__)
_DRAFT = int(Operation.DRAFT)
_AGAIN_SECONDS = 1.0
"""Seconds that a decoder should wait after a store could not be read."""
_LEAST_SECONDS = 1e-7
"""Seconds that another context takes in any case."""
_LOG_SECONDS = 1.0
"""Minimum seconds between two log lines about a failing release."""


class ReleaseStats:
    """Counters of one release and the estimated cost of a lookup."""

    __slots__ = ("alone", "each", "figures", "logged")

    def __init__(self, figures: ReleaseCounters) -> None:
        """Start with a default estimate of the cost."""
        self.figures = figures
        self.each = [10e-6 + 0.2e-6 * 2.0**bits for bits in range(14)]
        """Seconds per context by the bit length of the budget; running averages, as those of `alone`."""
        self.alone = self.each.copy()
        """Seconds of a lookup of one context, most of which others beside it do not add."""
        self.logged = -_LOG_SECONDS

    def cost(self, bits: int, contexts: int) -> float:
        """Return the estimated seconds of a lookup."""
        return self.alone[bits] + (contexts - 1) * self.each[bits]

    def fitting(self, bits: int, contexts: int, seconds: float) -> int:
        """Return how many of the contexts to look up in some seconds, so that all take few pieces of equal size."""
        most = max(1, 1 + int((seconds - self.alone[bits]) / self.each[bits]))
        return ceil(contexts / ceil(contexts / most))

    def learn(self, bits: int, contexts: int, seconds: float) -> None:
        """Update the estimate with the measured cost of a lookup."""
        costs = self.alone if contexts == 1 else self.each
        known = costs[bits]
        if contexts > 1:
            seconds = max((seconds - self.alone[bits]) / (contexts - 1), _LEAST_SECONDS)
        costs[bits] = known + (min(seconds, 2 * known) - known) / 8  # capped: a page fault is an outlier


class RequestKind:
    """What draft requests have in common that differ in their ids and contexts alone: what the first was allowed.

    Every check looks at bytes that `repeated` finds to be the same again, at the grant, or at what is served. A
    connection that asks for nothing more keeps its kind, so a kind has no drafter: files would stay mapped.

    Attributes:
        served: the store that is asked.
        strategy: name of its drafter.
        stats: of the release.
        grant: of the client.
        budget: maximum nodes of a draft.
        min_prob: minimum probability of a node.
        bits: place of the budget in the costs.
        request_bytes: size of the payload.
    """

    __slots__ = (
        "_fixed", "bits", "budget", "grant", "min_prob", "request_bytes", "served", "stats", "strategy",
    )  # fmt: skip

    def __init__(
        self, frame: Frame, request: DraftRequest, grant: Grant, served: ServedStore, stats: ReleaseStats
    ) -> None:
        """Hold what a request was allowed."""
        self.served = served
        self.strategy = request.strategy
        self.stats = stats
        self.grant = grant
        self.budget = request.budget
        self.min_prob = request.min_prob
        self.bits = request.budget.bit_length()
        self.request_bytes = frame.header.length
        plain = not request.sections and served.projection is None
        self._fixed = (
            FixedBytes(HEADER.pack(*frame.header) + frame.payload, request.contexts.shape) if plain else None
        )

    def repeated(self, data: bytes, grant: Grant | None) -> tuple[int, NDArray[np.int32]] | None:
        """Return id and contexts if the data are one more request of this kind; None if they must be looked at."""
        if grant is not self.grant or self._fixed is None:
            return None
        return self._fixed.match(data)


class DraftJob:
    """An allowed draft request and its progress."""

    __slots__ = (
        "_contexts", "_drafter", "_facts", "_parts", "_queries", "batch", "began", "failure", "kind", "left",
        "request_id", "seconds", "served",
    )  # fmt: skip

    def __init__(
        self, kind: RequestKind, request_id: int, contexts: NDArray[np.int32], began: float,
        queries: NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        """Start a job; `queries`, float32 [batch, dims], are for a dense store only.

        Raises:
            DraftstoreError: the store has no such strategy.
        """
        self.kind = kind
        self.served = kind.served
        self.request_id = request_id
        self.began = began
        self.batch = self.left = len(contexts)
        self.seconds = 0.0
        self.failure: Failure | None = None
        self._contexts = contexts
        self._drafter = kind.served.drafter(kind.strategy)
        self._queries = queries
        self._parts: list[EncodedDrafts] = []
        self._facts: list[tuple[NDArray[np.int32], NDArray[np.int32]]] = []

    @property
    def cost(self) -> float:
        """Estimated seconds of the lookup that is left."""
        return self.kind.stats.cost(self.kind.bits, self.left)

    def fitting(self, seconds: float) -> int:
        """Return how many of the contexts that are left to look up in some seconds."""
        return self.kind.stats.fitting(self.kind.bits, self.left, seconds)

    def work(self, rows: int) -> None:
        """Draft for the next contexts, at most `rows`; an error ends the job with a failure."""
        kind, contexts, queries = self.kind, self._contexts, self._queries
        if rows < self.batch or self.left < self.batch:
            done = self.batch - self.left
            contexts = contexts[done : done + rows]
            queries = None if queries is None else queries[done : done + rows]
        count = len(contexts)
        dense: dict[str, Any] = {} if queries is None else {"queries": queries}
        begin = perf_counter()
        try:
            drafts = self._drafter.draft_batch(contexts, kind.budget, kind.min_prob, **dense)
            seconds = perf_counter() - begin
            self._parts.append(encode_drafts(drafts))
        except DraftstoreError as error:
            self._fail(
                Status.UNAVAILABLE, "its store cannot be read now; the log of the service says why", error
            )
            return
        except Exception as error:  # noqa: BLE001 - one request must not end the others
            self._fail(Status.INTERNAL, "an unexpected error; the log of the service has it", error)
            return
        self.seconds += seconds
        self.left -= count
        self._facts.append((drafts.sizes, drafts.match_lengths))
        if count:
            kind.stats.learn(kind.bits, count, seconds)

    def encode(self, flags: int) -> bytes:
        """Return the answer and end the job."""
        if self.failure is not None:
            return encode_failure(_DRAFT, self.request_id, self.failure, flags)
        served = self.served
        micros = ceil(self.seconds * 1e6)
        return join_answer(self.request_id, served.build, served.tokenizer, micros, self._parts, flags)

    def count(self, answer_bytes: int) -> None:
        """Update the counters; best called after the answer is sent."""
        figures, request_bytes = self.kind.stats.figures, self.kind.request_bytes
        if self.failure is not None:
            figures.fail(self.failure.status, request_bytes, answer_bytes)
            return
        seconds = perf_counter() - self.began
        nodes = misses = 0
        matches: list[int] = []
        for sizes, lengths in self._facts:
            each = sizes.tolist()
            nodes += sum(each)
            misses += each.count(0)
            matches += lengths.tolist()
        figures.record(self.batch, matches, nodes, misses, request_bytes, answer_bytes, seconds)

    def _fail(self, status: Status, message: str, error: Exception) -> None:
        """End with a failure and log the reason, rate-limited; clients see no paths or system messages."""
        self.left = 0
        name, stats = self.served.name, self.kind.stats
        self.failure = Failure(status, _AGAIN_SECONDS, f"no drafts from {name!r}: {message}")
        now = monotonic()
        if now - stats.logged >= _LOG_SECONDS:
            stats.logged = now
            unexpected = error if status == Status.INTERNAL else None
            LOG.error("no drafts from %r: %s", name, error or type(error).__name__, exc_info=unexpected)
