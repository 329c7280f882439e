"""The client side of the lookup protocol without I/O: requests, connection state, answers.

Transports send and receive bytes (`connection` for threads, `async_connection` for event loops); `release` decides what
to ask and how to handle answers.
"""

import json
from collections.abc import Iterator
from typing import Any

from draftstore.drafting.projection import Projection
from draftstore.errors import WireError
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.queries import decode_projection
from draftstore.remote.requests import PreparedRequest
from draftstore.remote.wire import (
    ANSWER,
    CLOSING,
    HEADER,
    VERSION,
    DraftAnswer,
    Failure,
    Frame,
    Header,
    Operation,
    Status,
    decode_answer,
    decode_failure,
    frame,
)  # fmt: skip

ANY_TOKEN = 1 << 31
"""Vocabulary size while unknown: every token id lies below it."""
MAX_MESSAGE = 500
"""Maximum characters of a message from the service."""
SILENCE = 1.0
"""Seconds without data after which a connection with pending requests is given up."""
MAX_OWED = 1000
"""Maximum pending answers before a connection is given up."""
MAX_BYTES = 1 << 20
"""Maximum bytes of an answer, unless a request expects a longer one."""

_OK = int(Status.OK)
_DRAFTED = int(Operation.DRAFT) | ANSWER
_STATUS_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}


class RequestFailed(Exception):  # noqa: N818
    """A request without a usable answer. Never leaves the clients.

    Attributes:
        outcome: its name in the counters.
        failure: the service's refusal, if any.
    """

    def __init__(self, outcome: Outcome, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.failure = failure


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
        self._frames = FrameBuffer(MAX_BYTES)
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

    def usual(self, data: bytes, request: PreparedRequest, now: float) -> Frame | None:
        """Do what `received` and `settle` do if the data are the whole answer to the one request that is owed.

        Returns:
            The answer, or None for all other data, of which nothing is kept.
        """
        if len(data) < HEADER.size or len(self._owed) != 1 or not self._frames.empty:
            return None
        header = Header(*HEADER.unpack_from(data))
        if (
            header.request_id != request.id or request.id not in self._owed or header.flags
            or header.version != VERSION or header.length != len(data) - HEADER.size
            or header.length > self._frames.most
        ):  # fmt: skip
            return None
        self._since = now
        self._owed.clear()
        return Frame(header, data[HEADER.size :])

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
        number = header.request_id
        if header.flags & CLOSING:
            self.closing = True
        if number in self._owed:
            self._owed.discard(number)
            if not awaited:
                self._counters.add("late")
            return awaited
        if number == 0 and header.status != Status.OK:
            return True
        if number or not self._greeting:
            raise WireError(f"an answer to request {number}, which was never sent")
        self._greeting = False
        return False

    def hopeless(self, now: float) -> bool:
        """Return whether to give the connection up."""
        return len(self._owed) > MAX_OWED or (bool(self._owed) and now - self._since > SILENCE)


def check_answer(answer: Frame, operation: Operation) -> bytes:
    """Return the payload of a successful answer."""
    header, payload = answer
    if header.operation != operation | ANSWER and header.request_id:
        raise RequestFailed(Outcome.GARBAGE, f"operation {header.operation}, expected {operation | ANSWER}")
    if header.status == _OK:
        return payload
    try:
        failure = decode_failure(header, payload)
    except WireError as error:
        raise RequestFailed(Outcome.GARBAGE, str(error)) from None
    message = "".join(letter if letter.isprintable() else " " for letter in failure.message[:MAX_MESSAGE])
    raise RequestFailed(_STATUS_OUTCOMES[failure.status], message, failure)


def read_drafts(request: PreparedRequest, answer: Frame, vocab_size: int = ANY_TOKEN) -> DraftAnswer:
    """Return the drafts of an answer, with every tree validated, since decoders trust them.

    Raises:
        RequestFailed: the answer is a failure or invalid.
    """
    header, payload = answer
    if header.operation != _DRAFTED or header.status != _OK or not header.request_id:
        check_answer(answer, Operation.DRAFT)
        raise RequestFailed(Outcome.GARBAGE, "an answer to a greeting where drafts were expected")
    try:
        found = decode_answer(payload, vocab_size, request.budget)
    except WireError as error:
        raise RequestFailed(Outcome.INVALID, str(error)) from None
    if len(found.drafts) != request.batch:
        raise RequestFailed(Outcome.INVALID, f"{len(found.drafts)} drafts for {request.batch} contexts")
    return found


def read_releases(answer: Frame) -> list[dict[str, Any]]:
    """Return the releases in an answer.

    Raises:
        RequestFailed: the answer is a failure or not a list of releases.
    """
    payload = check_answer(answer, Operation.RELEASES)
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        raise RequestFailed(Outcome.GARBAGE, "its list of releases is not JSON") from None
    found = document.get("releases") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(release, dict) for release in found):
        raise RequestFailed(Outcome.GARBAGE, "its answer holds no list of releases")
    return found


def read_projection(answer: Frame) -> Projection:
    """Return the projection in an answer.

    Raises:
        RequestFailed: the answer is a failure or not a projection.
    """
    payload = check_answer(answer, Operation.PROJECTION)
    try:
        return decode_projection(payload)
    except WireError as error:
        raise RequestFailed(Outcome.GARBAGE, str(error)) from None
