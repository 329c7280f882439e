"""The protocol of the lookup service as a client speaks it, without I/O: requests, connections, answers.

Transports send the bytes and wait (`connection` in threads, `async_connection` in event loops); `release` decides what
to ask and what follows from the answers.
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
"""The vocabulary size of a client that knows none: every token id lies below it."""
MAX_BATCH = 512
"""Contexts of one request; more are asked in several."""
MAX_CONTEXT = 4096
"""Tokens of a context that are sent, the last ones; no store looks back as far."""
MAX_NUMBERS = 1 << 17
"""Tokens of all contexts of one request, plus the numbers of all its queries; more are asked in several."""
MAX_MESSAGE = 500
"""Letters of a message of the service that are passed on."""
SILENCE = 1.0
"""Seconds without a byte after which a connection that owes answers is given up."""
MOST_OWED = 1000
"""Answers that a connection may owe before it is given up."""
MOST_BYTES = 1 << 20
"""Bytes of the longest answer that is read, unless a request expects a longer one."""

_STATUS_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}


class Trouble(Exception):  # noqa: N818
    """A request got no usable answer. Never leaves the clients.

    Attributes:
        outcome: what the counters call it.
        failure: what the service said, if it refused.
    """

    def __init__(self, outcome: Outcome, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.failure = failure


class PreparedRequest(NamedTuple):
    """An encoded request, and what its answer must keep to.

    Attributes:
        id: which the answer repeats.
        data: the frame.
        batch: drafts that are asked for.
        budget: most nodes of each.
        longest_answer: bytes of the longest answer, where that may be more than `MOST_BYTES`.
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
    """Return the request for drafts of a batch of contexts; the arguments are those of `wire.DraftRequest`.

    Raises:
        WireError: the format cannot carry them.
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
    """Return the requests for a batch of contexts: one, none where nothing can be drafted, or several.

    The first of `ids` are theirs; the other arguments are those of `ContextDrafter.draft` and `prepare_draft`.

    Raises:
        DraftstoreError: the arguments are those that a local store refuses too.
    """
    contexts, level = check_request(contexts, budget, min_prob)
    batch, width = contexts.shape
    if batch == 0 or budget == 0 or level < 0:
        return []
    if queries is not None:
        queries.check(batch)
        if not queries.any:
            return []
    # The wire carries the probability as float32. Rounded, it may fall on the other side of a level, so send that of
    # the level itself.
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
    """Return the frame that presents a bearer token, to send before the first request; empty without one."""
    return b"" if token is None else frame(Operation.HELLO, 0, token.encode(errors="surrogatepass"))


class ConnectionState:
    """What one connection still owes, and since when nothing has come.

    Attributes:
        closing: whether the service wants no more requests on this connection.
    """

    def __init__(self, hello: bytes, counters: Counters) -> None:
        """Start without requests.

        Args:
            hello: a frame to send before the first request; may be empty.
            counters: for answers that come late.
        """
        self.closing = False
        self._hello = hello
        self._greeting = bool(hello)
        self._counters = counters
        self._frames = FrameBuffer(MOST_BYTES)
        self._owed: set[int] = set()
        self._since = 0.0

    def bytes_of(self, request: PreparedRequest) -> bytes:
        """Return what to send for a request, the greeting before the first one."""
        return self._hello + request.data if self._hello else request.data

    def sent(self, request: PreparedRequest, now: float) -> None:
        """Note that a request is on its way."""
        self._hello = b""
        if not self._owed:
            self._since = now
        self._owed.add(request.id)
        if self._frames.most < request.longest_answer:
            self._frames.most = request.longest_answer

    def received(self, data: bytes, now: float) -> Iterator[Frame]:
        """Take in what has come, and return the frames that are now complete; `settle` says what each is.

        Raises:
            WireError: the bytes are no frames.
        """
        self._since = now
        return self._frames.feed(data)

    def settle(self, answer: Frame, awaited: bool) -> bool:
        """Note an answer, and return whether it is of use.

        A failure with the id 0 is: it concerns the whole connection, and answers every request.

        Args:
            answer: a frame that has come.
            awaited: whether someone waits for the answer to the request of this id.

        Raises:
            WireError: it answers what was not asked.
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
        """Return whether the connection should be given up."""
        return len(self._owed) > MOST_OWED or (bool(self._owed) and now - self._since > SILENCE)


def check_answer(answer: Frame, operation: Operation) -> bytes:
    """Return the payload of an answer that is no failure.

    Raises:
        Trouble: it is one, or it answers something else.
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
    """Return the drafts of an answer; every tree is checked, as a decoder follows them blindly.

    Raises:
        Trouble: the answer is a failure, or breaks a promise.
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
    """Return what a service says that it serves.

    Raises:
        Trouble: the answer is a failure, or no list of releases.
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
    """Return the projection that a service has sent.

    Raises:
        Trouble: the answer is a failure, or no projection.
    """
    payload = check_answer(answer, Operation.PROJECTION)
    try:
        return decode_projection(payload)
    except WireError as error:
        raise Trouble(Outcome.GARBAGE, str(error)) from None
