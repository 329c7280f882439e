"""A running server takes any bytes: it does not crash, does not grow, and answers properly afterwards."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.queries import decode_projection
from draftstore.remote.wire import HEADER, Status
from draftstore.stores.registry import open_store
from tests.fakes.dense_stores import make_projection
from tests.fakes.frame_fuzzer import FrameFuzzer, is_frame
from tests.fakes.lookups import ServerProcess, contexts_of, serving_process

MEGABYTES = 1 << 20
PROJECTION = make_projection()
"""That of the dense store."""
AHEAD = 4
"""Requests that a connection has under way."""


@pytest.fixture(scope="module")
def running(small_crest: Path, small_store: Path, small_dense: Path) -> Iterator[ServerProcess]:
    with serving_process({"crest": small_crest, "rest": small_store, "dense": small_dense}) as process:
        yield process


def make_fuzzer(seed: int) -> FrameFuzzer:
    return FrameFuzzer(seed, ("crest", "rest"), "dense", (PROJECTION, PROJECTION, make_projection(seed=1)))


def fuzz(server: ServerProcess, inputs: int, seed: int) -> Counter[Status]:
    """Send inputs and count how they ended. What is a frame gets an answer; what is none ends its connection."""
    fuzzer, statuses, sent = make_fuzzer(seed), Counter[Status](), 0
    while sent < inputs:
        with server.caller() as caller:
            whole = True
            while whole and sent < inputs:
                group: list[bytes] = []
                while whole and len(group) < fuzzer.random.randint(1, AHEAD):
                    group.append(fuzzer())
                    whole = is_frame(group[-1])
                sent += len(group)
                caller.send(b"".join(group))
                for _ in range(len(group) - (not whole)):
                    frame = caller.receive()
                    assert frame, "no answer to a frame"
                    statuses[check(frame)] += 1
            caller.socket.shutdown(1)
            while frame := caller.receive():
                assert not whole
                statuses[check(frame)] += 1
    return statuses


def check(frame: wire.Frame) -> Status:
    """Read an answer as a client does, and return how the request ended."""
    assert frame.header.operation & wire.ANSWER
    if frame.header.status:
        failure = wire.decode_failure(frame.header, frame.payload)
        assert failure.status != Status.INTERNAL, failure
        assert failure.message
    elif frame.header.operation == wire.Operation.DRAFT | wire.ANSWER:
        wire.decode_answer(frame.payload, 384)
    elif frame.header.operation == wire.Operation.PROJECTION | wire.ANSWER:
        assert decode_projection(frame.payload).digest == PROJECTION.digest
    else:
        assert isinstance(json.loads(frame.payload), dict)
    return Status(frame.header.status)


def check_answers(server: ServerProcess, path: Path, name: str) -> None:
    """Check that a server answers as the local store does."""
    contexts = contexts_of(path, 100)
    store = open_store(path)
    expected = wire.encode_answer(0, 0, 0, 0, store.drafter().draft_batch(contexts))[HEADER.size + 24 :]
    store.close()
    with server.caller() as caller:
        assert caller.draft_frame(name, contexts).payload[24:] == expected


def check_fuzz(server: ServerProcess, stores: dict[str, Path], inputs: int) -> None:
    """Fuzz a server that is warm; its memory may not grow by more than noise."""
    fuzz(server, 2_000, 0)
    before = server.memory()
    statuses = fuzz(server, inputs, 1)
    grown = server.memory() - before
    for name, path in stores.items():
        check_answers(server, path, name)
    assert statuses[Status.OK] > inputs / 50, statuses
    assert statuses[Status.BAD_REQUEST] > inputs / 50, statuses
    assert {Status.NOT_FOUND, Status.TOO_LARGE, Status.OTHER_PROJECTION} <= statuses.keys()
    assert Status.INTERNAL not in statuses
    assert grown < 24 * MEGABYTES, f"{grown:,} bytes"


def test_five_thousand_inputs(running: ServerProcess, small_crest: Path, small_store: Path) -> None:
    check_fuzz(running, {"crest": small_crest, "rest": small_store}, 5_000)


@pytest.mark.slow
def test_a_hundred_thousand_inputs(running: ServerProcess, small_crest: Path, small_store: Path) -> None:
    check_fuzz(running, {"crest": small_crest, "rest": small_store}, 100_000)


def test_half_frames_on_many_connections(running: ServerProcess, small_crest: Path) -> None:
    fuzzer = make_fuzzer(5)
    callers = [running.caller() for _ in range(200)]
    for caller in callers:
        frame = fuzzer.unchanged()
        caller.send(frame[: fuzzer.random.randrange(1, len(frame))])
    check_answers(running, small_crest, "crest")
    for caller in callers:
        caller.close()
    check_answers(running, small_crest, "crest")


def test_connections_that_end_at_once(running: ServerProcess, small_crest: Path) -> None:
    request = make_fuzzer(6).valid[2]
    for number in range(300):
        with running.caller() as caller:
            if number % 3:
                caller.send(request * (number % 7))
            if number % 2:
                caller.socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: reset
    check_answers(running, small_crest, "crest")


def test_the_checks_of_this_file_find_what_they_should() -> None:
    with pytest.raises(AssertionError):
        check(wire.Frame(wire.Header(0, 1, 0x82, Status.INTERNAL, 0, 1), bytes(4) + b"oops"))
    with pytest.raises(WireError):
        check(wire.Frame(wire.Header(0, 1, 0x82, Status.OK, 0, 1), bytes(30)))
