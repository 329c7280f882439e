"""Answers to requests: checks, the lookup, and the encoded answer. Uses no sockets.

    job = answerer.begin(frame, grant)      # a checked draft request, or the bytes of a refusal
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

from draftstore.drafting.drafter import StoreDrafter
from draftstore.errors import DraftstoreError, WireError, counted
from draftstore.remote.queries import OtherProjectionError, read_queries
from draftstore.remote.wire import (
    ANSWER,
    MAX_NAME,
    VERSION,
    DraftRequest,
    EncodedDrafts,
    Failure,
    Frame,
    Header,
    Operation,
    Status,
    decode_request,
    encode_drafts,
    encode_failure,
    encode_json,
    join_answer,
)
from draftstore.remote.wire import frame as encode_frame
from services.common.permissions import Grant, Permissions
from services.lookup.figures.counting import ReleaseCounters, Slot
from services.lookup.limits import Limits
from services.lookup.stores.served import OpenStores, ServedStore, UnknownReleaseError

LOG = logging.getLogger(__name__)
_DRAFT = int(Operation.DRAFT)
_HELLO = int(Operation.HELLO)
_RELEASES = int(Operation.RELEASES)
_PROJECTION = int(Operation.PROJECTION)
_NEEDS_TOKEN = "this service needs a token first (operation HELLO)"  # noqa: S105 (a sentence)
_AGAIN_SECONDS = 1.0
"""Seconds that a decoder should wait after a store could not be read."""
_LOG_SECONDS = 1.0
"""Minimum seconds between two log lines about a failing release."""


class ReleaseStats:
    """Counters of one release and the estimated cost of a lookup."""

    __slots__ = ("costs", "figures", "logged")

    def __init__(self, figures: ReleaseCounters) -> None:
        """Start with a default estimate of the cost."""
        self.figures = figures
        self.costs = [10e-6 + 0.2e-6 * 2.0**bits for bits in range(14)]
        """Seconds per context by the bit length of the budget; running averages."""
        self.logged = -_LOG_SECONDS

    def learn(self, bits: int, seconds: float) -> None:
        """Update the estimate with the measured cost of a context."""
        known = self.costs[bits]
        self.costs[bits] = known + (min(seconds, 4 * known) - known) / 8  # capped: a page fault is an outlier


class DraftJob:
    """A valid draft request and its progress."""

    __slots__ = (
        "_bits",
        "_contexts",
        "_drafter",
        "_matches",
        "_min_prob",
        "_parts",
        "_queries",
        "_sizes",
        "batch",
        "began",
        "budget",
        "failure",
        "left",
        "request_bytes",
        "request_id",
        "seconds",
        "served",
        "stats",
    )  # fmt: skip

    def __init__(
        self, frame: Frame, request: DraftRequest, served: ServedStore, drafter: StoreDrafter, stats: ReleaseStats,
        began: float, queries: NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        """Start a job; `queries`, float32 [batch, dims], are for a dense store only."""
        self.request_id = frame.header.request_id
        self.request_bytes = frame.header.length
        self.served = served
        self.stats = stats
        self.began = began
        self.budget = request.budget
        self.batch = self.left = len(request.contexts)
        self.seconds = 0.0
        self.failure: Failure | None = None
        self._contexts = request.contexts
        self._queries = queries
        self._min_prob = request.min_prob
        self._drafter = drafter
        self._bits = request.budget.bit_length()
        self._parts: list[EncodedDrafts] = []
        self._sizes: list[NDArray[np.int32]] = []
        self._matches: list[NDArray[np.int32]] = []

    @property
    def cost(self) -> float:
        """Estimated seconds per context."""
        return self.stats.costs[self._bits]

    def work(self, rows: int) -> None:
        """Draft for the next contexts, at most `rows`; an error ends the job with a failure."""
        contexts, queries = self._contexts, self._queries
        if rows < self.batch or self.left < self.batch:
            done = self.batch - self.left
            contexts = contexts[done : done + rows]
            queries = None if queries is None else queries[done : done + rows]
        count = len(contexts)
        dense: dict[str, Any] = {} if queries is None else {"queries": queries}
        begin = perf_counter()
        try:
            drafts = self._drafter.draft_batch(contexts, self.budget, self._min_prob, **dense)
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
        self._sizes.append(drafts.sizes)
        self._matches.append(drafts.match_lengths)
        if count:
            self.stats.learn(self._bits, seconds / count)

    def encode(self, flags: int) -> bytes:
        """Return the answer and end the job."""
        if self.failure is not None:
            return encode_failure(_DRAFT, self.request_id, self.failure, flags)
        micros = ceil(self.seconds * 1e6)
        return join_answer(
            self.request_id, self.served.build, self.served.tokenizer, micros, self._parts, flags
        )

    def count(self, answer_bytes: int) -> None:
        """Update the counters; best called after the answer is sent."""
        figures = self.stats.figures
        if self.failure is not None:
            figures.fail(self.failure.status, self.request_bytes, answer_bytes)
            return
        seconds = perf_counter() - self.began
        sizes, matches = _joined(self._sizes), _joined(self._matches)
        if self.batch == 1:  # the same, faster
            nodes = sizes.item()
            misses = int(nodes == 0)
        else:
            nodes = int(sizes.sum())
            misses = self.batch - int(np.count_nonzero(sizes))
        figures.record(self.batch, matches, nodes, misses, self.request_bytes, answer_bytes, seconds)

    def _fail(self, status: Status, message: str, error: Exception) -> None:
        """End with a failure and log the reason, rate-limited; clients see no paths or system messages."""
        self.left = 0
        name = self.served.name
        self.failure = Failure(status, _AGAIN_SECONDS, f"no drafts from {name!r}: {message}")
        now = monotonic()
        if now - self.stats.logged >= _LOG_SECONDS:
            self.stats.logged = now
            unexpected = error if status == Status.INTERNAL else None
            LOG.error("no drafts from %r: %s", name, error or type(error).__name__, exc_info=unexpected)


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the parts of a job's result as one array."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Answerer:
    """Answers the requests of one process."""

    def __init__(self, open_stores: OpenStores, permissions: Permissions, limits: Limits, slot: Slot) -> None:
        """Answer from the open stores.

        Args:
            open_stores: the stores that are served.
            permissions: permissions of clients; may be replaced at any time.
            limits: limits on requests.
            slot: counters of this process.
        """
        self.permissions = permissions
        self.limits = limits
        self.slot = slot
        self._open_stores = open_stores
        self._stats: dict[str, ReleaseStats] = {}

    def begin(self, frame: Frame, grant: Grant | None, flags: int = 0) -> DraftJob | bytes:
        """Check a draft request.

        Args:
            frame: frame of operation `DRAFT`.
            grant: grant of the client; None before it presented a token, where one is needed.
            flags: flags of the answer if the request is refused.

        Returns:
            The job, or the answer if there is nothing to look up.
        """
        began = perf_counter()
        if grant is None:
            return self.refuse(frame.header, Status.UNAUTHORIZED, _NEEDS_TOKEN, flags)
        try:
            request = decode_request(frame.payload)
        except WireError as error:
            return self.refuse(frame.header, Status.BAD_REQUEST, str(error), flags)
        if not grant.allows(request.name):  # whether or not it exists
            return self._forbid(frame.header, grant, request.name, flags)
        limits = self.limits
        batch, width = request.contexts.shape
        most = limits.budget if grant.max_budget is None else grant.max_budget
        if batch > limits.batch or width > limits.context or request.budget > most:
            return self.refuse(frame.header, Status.TOO_LARGE, self._too_large(request, most), flags)
        return self._find(frame, request, began, flags)

    def _find(self, frame: Frame, request: DraftRequest, began: float, flags: int) -> DraftJob | bytes:
        """Find the store of a request and check that the request fits it."""
        name = request.name
        try:
            served = self._open_stores.get(name)
            drafter = served.drafter(request.strategy)
        except UnknownReleaseError as error:
            return self.refuse(frame.header, Status.NOT_FOUND, str(error), flags)
        except DraftstoreError as error:
            return self.refuse(frame.header, Status.NOT_FOUND, f"{name!r}: {error}", flags)
        stats = self._stats.get(name)
        if stats is None:
            stats = self._stats[name] = ReleaseStats(self.slot.release(name))
        if served.projection is None:  # hidden states are ignored
            return DraftJob(frame, request, served, drafter, stats, began)
        try:
            queries = read_queries(request.sections, len(request.contexts), served.projection)
        except WireError as error:
            return self.refuse(frame.header, Status.BAD_REQUEST, f"{name!r}: {error}", flags)
        except OtherProjectionError as error:
            message = f"{name!r}: {error}"
            return self.refuse(frame.header, Status.OTHER_PROJECTION, message, flags, figures=stats.figures)
        return DraftJob(frame, request, served, drafter, stats, began, queries)

    def answer_other(self, frame: Frame, grant: Grant | None, flags: int = 0) -> bytes:
        """Answer a request other than a draft request or greeting."""
        header = frame.header
        if header.operation not in (_RELEASES, _PROJECTION):
            message = f"operation {header.operation} is unknown: this service speaks version {VERSION}"
            return self.refuse(header, Status.BAD_REQUEST, message, flags)
        if grant is None:
            return self.refuse(header, Status.UNAUTHORIZED, _NEEDS_TOKEN, flags)
        if header.operation == _PROJECTION:
            return self._answer_projection(frame, grant, flags)
        return encode_json(
            _RELEASES, header.request_id, {"releases": self._open_stores.describe(grant.allows)}, flags
        )

    def _answer_projection(self, frame: Frame, grant: Grant, flags: int) -> bytes:
        """Answer with the projection of a dense store."""
        header = frame.header
        if len(frame.payload) > MAX_NAME:
            message = f"the name of a release has at most {MAX_NAME} bytes, found {len(frame.payload):,}"
            return self.refuse(header, Status.BAD_REQUEST, message, flags)
        try:
            name = frame.payload.decode()
        except UnicodeDecodeError:
            return self.refuse(header, Status.BAD_REQUEST, "the name of a release is not UTF-8", flags)
        if not grant.allows(name):
            return self._forbid(header, grant, name, flags)
        try:
            served = self._open_stores.get(name)
        except UnknownReleaseError as error:
            return self.refuse(header, Status.NOT_FOUND, str(error), flags)
        if served.projection is None:
            message = f"{name!r} has no projection: its store is of kind {served.kind!r}, expected 'dresd'"
            return self.refuse(header, Status.NOT_FOUND, message, flags)
        return encode_frame(
            header.operation | ANSWER, header.request_id, served.encoded_projection, Status.OK, flags
        )

    def greet(self, frame: Frame, flags: int = 0, budget: int | None = None) -> tuple[Grant | None, bytes]:
        """Answer a greeting.

        Args:
            frame: frame of operation `HELLO`.
            flags: flags of the answer.
            budget: maximum nodes of a draft where the token names none; by default that of the limits.

        Returns:
            The client's grant, None if its token is unknown, and the answer.
        """
        header = frame.header
        grant = self.permissions.identify(frame.payload)
        if grant is None:
            message = "this token is not known here"
            return None, self.refuse(header, Status.UNAUTHORIZED, message, flags)
        most = grant.max_budget or budget or self.limits.budget
        document = {"version": VERSION, "limits": self.limits.public(most)}
        return grant, encode_json(_HELLO, header.request_id, document, flags)

    def refuse(
        self, header: Header, status: Status, message: str, flags: int = 0, retry_after: float = 0.0,
        figures: ReleaseCounters | None = None,
    ) -> bytes:  # fmt: skip
        """Return a failure and count it under its release if served, else under none."""
        data = encode_failure(
            header.operation, header.request_id, Failure(status, retry_after, message), flags
        )
        (figures or self.slot.nothing).fail(status, header.length, len(data))
        return data

    def _forbid(self, header: Header, grant: Grant, name: str, flags: int) -> bytes:
        """Refuse a release that the token does not cover."""
        return self.refuse(header, Status.FORBIDDEN, f"the token {grant.name!r} may not use {name!r}", flags)

    def _too_large(self, request: DraftRequest, most: int) -> str:
        """Say which limit a request exceeds."""
        batch, width = request.contexts.shape
        limits = self.limits
        return (
            f"{counted(batch, 'context')} of {counted(width, 'token')} with a budget of {request.budget}: expected "
            f"at most {limits.batch} contexts of {limits.context} tokens with a budget of {most}"
        )
