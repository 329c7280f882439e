"""What a client accepts as an answer: everything else is refused and counted by outcome."""

from typing import Any

import pytest

from draftstore.remote import wire
from draftstore.remote.connection import RequestFailed, check_answer, read_drafts, read_releases
from draftstore.remote.counters import Outcome
from draftstore.remote.wire import ANSWER, Failure, Frame, Operation, Status
from draftstore.trees.batch import DraftBatch
from tests.unit.trees.test_batch import batch_of
from tests.unit.trees.test_tree import tree_of

DRAFT = Operation.DRAFT | ANSWER
BUSY = wire.encode_failure(
    Operation.DRAFT, 7, Failure(Status.BUSY, 0.5, "because\nof \x1b[31mthis" + "!" * 999)
)


def frame_of(data: bytes) -> Frame:
    return Frame(wire.read_header(data), data[wire.HEADER.size :])


def answer(tokens: list[int], parents: list[int]) -> bytes:
    """Return an answer of one tree."""
    batch = batch_of([tree_of(tokens, parents, [0] * len(tokens))], len(tokens))
    return wire.encode_answer(7, 1, 2, 3, batch)[wire.HEADER.size :]


def refused(call: Any, *arguments: object) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wire.frame(DRAFT, 8), "an answer to request 8, not 7"),
        (wire.frame(DRAFT, 0), "an answer to request 0"),
        (wire.encode_json(Operation.RELEASES, 7, {}), "operation 131, expected 130"),
        (wire.frame(Operation.DRAFT, 7), "operation 2, expected 130"),
        (wire.frame(DRAFT, 8, bytes(4), Status.BUSY), "an answer to request 8"),
        (wire.frame(DRAFT, 7, bytes(4), 99), "status 99 cannot be read"),
        (wire.frame(DRAFT, 7, bytes(3), Status.BUSY), "status 6 cannot be read"),
        (wire.frame(DRAFT, 7, bytes(4) + b"\xff", Status.BUSY), "status 6 cannot be read"),
    ],
)
def test_other_frames_are_garbage(data: bytes, reason: str) -> None:
    trouble = refused(check_answer, frame_of(data), Operation.DRAFT, 7)
    assert (trouble.outcome, trouble.failure) == (Outcome.GARBAGE, None)
    assert reason in str(trouble)


@pytest.mark.parametrize("number", [7, 0])  # 0: of the whole connection
@pytest.mark.parametrize("status", list(Status)[1:])
def test_a_refusal_has_its_status_and_its_time(status: Status, number: int) -> None:
    data = wire.encode_failure(Operation.DRAFT, number, Failure(status, 0.5, "because"))
    trouble = refused(check_answer, frame_of(data), Operation.DRAFT, 7)
    assert (trouble.outcome, trouble.failure) == (Outcome[status.name], Failure(status, 0.5, "because"))


def test_a_message_of_the_service_is_short_and_harmless() -> None:
    trouble = refused(check_answer, frame_of(BUSY), Operation.DRAFT, 7)
    assert str(trouble).startswith("because of  [31mthis!")
    assert len(str(trouble)) == 500


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "at least 24 bytes"),
        (answer([5, 5], [1, -1]), "broken tree"),
        (answer([10], [-1]), "a token id lies outside the vocabulary"),
        (answer([5, 6, 7], [-1, -1, -1]), "3 nodes, more than requested"),
        (wire.encode_answer(7, 1, 2, 3, DraftBatch.empty(2))[16:], "2 drafts for 1 contexts"),
    ],
)
def test_other_drafts_are_invalid(payload: bytes, reason: str) -> None:
    trouble = refused(read_drafts, payload, 1, 2, 10)
    assert trouble.outcome == Outcome.INVALID
    assert reason in str(trouble)


def test_releases_are_a_list_of_documents() -> None:
    assert read_releases(b'{"releases": [{"name": "chat"}]}') == [{"name": "chat"}]
    for payload in (b"", b"null", b"[]", b"{}", b'{"releases": 3}', b'{"releases": [1]}', b"[" * 100_000):
        assert refused(read_releases, payload).outcome == Outcome.GARBAGE
