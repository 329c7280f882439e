"""The client side of the lookup protocol without I/O: requests, connection state, answers.

Transports send and receive bytes (`connection` for threads, `async_connection` for event loops); `release` decides what
to ask and how to handle answers.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_request
from draftstore.drafting.projection import Projection
from draftstore.errors import WireError
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.queries import Queries, decode_projection
from draftstore.remote.wire import (
    ANSWER,
    CLOSING,
    DraftAnswer,
    Failure,
    Frame,
    Operation,
    Status,
    decode_answer,
    decode_failure,
    encode_request,
    frame,
)  # fmt: skip
from draftstore.trees.tree import LEVEL_PROBS, LOWEST_LEVEL

ANY_TOKEN = 1 << 31
"""Vocabulary size while unknown: every token id lies below it."""
MAX_BATCH = 512
"""Maximum contexts per request; larger batches are split."""
MAX_CONTEXT = 4096
"""Maximum tokens of a context that are sent, the last ones; no store looks back further."""
MAX_NUMBERS = 1 << 17
"""Maximum tokens of all contexts plus values of all queries per request; larger batches are split."""
MAX_MESSAGE = 500
"""Maximum characters of a message from the service."""
SILENCE = 1.0
"""Seconds without data after which a connection with pending requests is given up."""
MOST_OWED = 1000
"""Maximum pending answers before a connection is given up."""
MOST_BYTES = 1 << 20
"""Maximum bytes of an answer, unless a request expects a longer one."""

_STATUS_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}


class Trouble(Exception):  # noqa: N818
    """A request without a usable answer. Never leaves the clients.

    Attributes:
        outcome: its name in the counters.
        failure: the service's refusal, if any.
    """

    def __init__(self, outcome: Outcome, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.failure = failure


class PreparedRequest(NamedTuple):
    """An encoded request, and limits for its answer.

    Attributes:
        id: request id, repeated in the answer.
        data: the frame.
        batch: number of drafts.
        budget: maximum nodes of each.
        longest_answer: maximum size of the answer, where that may exceed `MOST_BYTES`.
    """

    id: int
    data: bytes
    batch: int = 0
    budget: int = 0
    longest_answer: int = 0


def prepare_draft(
    request_id: int,
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float,
    strategy: str,
    queries: Queries | None = None,
) -> PreparedRequest:
    """Return the request for a batch of drafts; the arguments are those of `wire.DraftRequest`.

    Raises:
        WireError: the arguments do not fit the wire format.
    """
    sections = None if queries is None else queries.sections()
    data = encode_request(request_id, name, contexts, budget, min_prob, strategy, sections)
    batch = len(contexts)
    return PreparedRequest(request_id, data, batch, budget, longest_answer=24 + batch * (16 + 7 * budget))


def prepare_drafts(
    ids: Iterator[int],
    name: str,
    contexts: NDArray[np.int32],
    budget: int,
    min_prob: float,
    strategy: str,
    queries: Queries | None = None,
) -> list[PreparedRequest]:
    """Return the requests for a batch of contexts: one, several, or none if nothing can be drafted.

    They take the next of `ids`; the other arguments are those of `ContextDrafter.draft` and `prepare_draft`.

    Raises:
        DraftstoreError: arguments that a local store refuses too.
    """
    contexts, level = check_request(contexts, budget, min_prob)
    batch, width = contexts.shape
    if batch == 0 or budget == 0 or level < 0:
        return []
    if queries is not None:
        queries.check(batch)
        if not queries.any:
            return []
    # The wire format has float32 probabilities. Rounding may cross a level's bound, so send the level's own
    # probability.
    least = 0.0 if level == LOWEST_LEVEL else float(LEVEL_PROBS[level])
    if batch == 1 and width <= MAX_CONTEXT:
        return [prepare_draft(next(ids), name, contexts, budget, least, strategy, queries)]
    contexts = contexts[:, -MAX_CONTEXT:]
    numbers = contexts.shape[1] + (0 if queries is None else queries.vectors.shape[1])
    size = max(1, min(MAX_BATCH, MAX_NUMBERS // max(numbers, 1)))
    return [
        prepare_draft(
            next(ids), name, contexts[first : first + size], budget, least, strategy,
            None if queries is None else queries.part(first, first + size),
        )
        for first in range(0, batch, size)
    ]  # fmt: skip


def greeting(token: str | None) -> bytes:
    """Return the frame that presents a bearer token before the first request; empty without one."""
    return b"" if token is None else frame(Operation.HELLO, 0, token.encode(errors="surrogatepass"))


class ConnectionState:
    """The pending requests of a connection, and the time since data last arrived.

    Attributes:
        closing: whether the service wants no more requests on this connection.
    """

    def __init__(self, hello: bytes, counters: Counters) -> None:
        """Start without requests.

        Args:
            hello: frame to send before the first request; may be empty.
            counters: for late answers.
        """
        self.closing = False
        self._hello = hello
        self._greeting = bool(hello)
        self._counters = counters
        self._frames = FrameBuffer(MOST_BYTES)
        self._owed: set[int] = set()
        self._since = 0.0

    def bytes_of(self, request: PreparedRequest) -> bytes:
        """Return the data to send for a request, with the greeting before the first one."""
        return self._hello + request.data if self._hello else request.data

    def sent(self, request: PreparedRequest, now: float) -> None:
        """Record a sent request."""
        self._hello = b""
        if not self._owed:
            self._since = now
        self._owed.add(request.id)
        if self._frames.most < request.longest_answer:
            self._frames.most = request.longest_answer

    def received(self, data: bytes, now: float) -> Iterator[Frame]:
        """Process received data and yield the complete frames; `settle` classifies each.

        Raises:
            WireError: the data are not frames.
        """
        self._since = now
        return self._frames.feed(data)

    def settle(self, answer: Frame, awaited: bool) -> bool:
        """Record an answer; return whether it is relevant.

        A failure with id 0 is relevant: it concerns the whole connection, and answers every request.

        Args:
            answer: a received frame.
            awaited: whether a caller waits for the answer with this id.

        Raises:
            WireError: it answers no request.
        """
        header = answer.header
        if header.flags & CLOSING:
            self.closing = True
        if header.request_id in self._owed:
            self._owed.discard(header.request_id)
            if not awaited:
                self._counters.add("late")
            return awaited
        if header.request_id == 0 and header.status != Status.OK:
            return True
        if header.request_id or not self._greeting:
            raise WireError(f"an answer to request {header.request_id}, which was never sent")
        self._greeting = False
        return False

    def hopeless(self, now: float) -> bool:
        """Return whether to give the connection up."""
        return len(self._owed) > MOST_OWED or (bool(self._owed) and now - self._since > SILENCE)


def check_answer(answer: Frame, operation: Operation) -> bytes:
    """Return the payload of a successful answer.

    Raises:
        Trouble: it is a failure, or answers another operation.
    """
    header, payload = answer
    if header.operation != operation | ANSWER and header.request_id:
        raise Trouble(Outcome.GARBAGE, f"operation {header.operation}, expected {operation | ANSWER}")
    if header.status == Status.OK:
        return payload
    try:
        failure = decode_failure(header, payload)
    except WireError as error:
        raise Trouble(Outcome.GARBAGE, str(error)) from None
    message = "".join(letter if letter.isprintable() else " " for letter in failure.message[:MAX_MESSAGE])
    raise Trouble(_STATUS_OUTCOMES[failure.status], message, failure)


def read_drafts(request: PreparedRequest, answer: Frame, vocab_size: int = ANY_TOKEN) -> DraftAnswer:
    """Return the drafts of an answer, with every tree validated, since decoders trust them.

    Raises:
        Trouble: the answer is a failure or invalid.
    """
    payload = check_answer(answer, Operation.DRAFT)
    if not answer.header.request_id:
        raise Trouble(Outcome.GARBAGE, "an answer to a greeting where drafts were expected")
    try:
        found = decode_answer(payload, vocab_size, request.budget)
    except WireError as error:
        raise Trouble(Outcome.INVALID, str(error)) from None
    if len(found.drafts) != request.batch:
        raise Trouble(Outcome.INVALID, f"{len(found.drafts)} drafts for {request.batch} contexts")
    return found


def read_releases(answer: Frame) -> list[dict[str, Any]]:
    """Return the releases in an answer.

    Raises:
        Trouble: the answer is a failure or not a list of releases.
    """
    payload = check_answer(answer, Operation.RELEASES)
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        raise Trouble(Outcome.GARBAGE, "its list of releases is not JSON") from None
    found = document.get("releases") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(release, dict) for release in found):
        raise Trouble(Outcome.GARBAGE, "its answer holds no list of releases")
    return found


def read_projection(answer: Frame) -> Projection:
    """Return the projection in an answer.

    Raises:
        Trouble: the answer is a failure or not a projection.
    """
    payload = check_answer(answer, Operation.PROJECTION)
    try:
        return decode_projection(payload)
    except WireError as error:
        raise Trouble(Outcome.GARBAGE, str(error)) from None
