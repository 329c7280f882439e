"""Validation of answers in the client: decoders trust drafts, so nothing unchecked leaves this module."""

import json
from typing import Any

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.counters import Outcome
from draftstore.remote.wire import ANSWER, DraftAnswer, Failure, Frame, Operation, Status

MAX_MESSAGE = 500
"""Maximum characters of a message from the service."""
_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}


class RequestFailed(Exception):  # noqa: N818
    """A request without a usable answer: its outcome, and the service's refusal, if any. Never leaves the client."""

    def __init__(self, outcome: Outcome, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.failure = failure


def check_answer(answer: Frame, operation: Operation, request_id: int) -> bytes:
    """Return the payload of a successful answer to a request; RequestFailed for anything else."""
    header, payload = answer
    failed = header.status != 0
    if header.request_id != request_id and (header.request_id or not failed):
        raise RequestFailed(Outcome.GARBAGE, f"an answer to request {header.request_id}, not {request_id}")
    if header.operation != operation | ANSWER and header.request_id:
        raise RequestFailed(Outcome.GARBAGE, f"operation {header.operation}, expected {operation | ANSWER}")
    if not failed:
        return payload
    try:
        failure = wire.decode_failure(header, payload)
    except WireError as error:
        raise RequestFailed(Outcome.GARBAGE, str(error)) from None
    message = "".join(letter if letter.isprintable() else " " for letter in failure.message[:MAX_MESSAGE])
    raise RequestFailed(_OUTCOMES[header.status], message, failure)


def read_drafts(payload: bytes, batch: int, budget: int, vocab_size: int) -> DraftAnswer:
    """Decode drafts for `batch` contexts, each of at most `budget` nodes; RequestFailed if they are invalid."""
    try:
        return wire.decode_answer(payload, vocab_size, budget, batch)
    except WireError as error:
        raise RequestFailed(Outcome.INVALID, str(error)) from None


def read_releases(payload: bytes) -> list[dict[str, Any]]:
    """Decode the releases in an answer; RequestFailed if it has no list of releases."""
    try:
        return [dict(release) for release in json.loads(payload)["releases"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestFailed(Outcome.GARBAGE, "its answer has no list of releases") from None
