"""A running server takes any bytes: it does not crash, does not grow, and answers properly afterwards."""

import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from draftstore.errors import WireError
from draftstore.remote import wire
from draftstore.remote.queries import Queries, decode_projection
from draftstore.remote.wire import HEADER, Status
from draftstore.stores.registry import open_store
from services.lookup.limits import Limits
from tests.fakes.dense_stores import make_projection
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


class Fuzzer:
    """Makes inputs of every kind; the same ones for one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        contexts = np.random.default_rng(seed).integers(-2, 500, (8, 16)).astype(np.int32)
        sections = {1: bytes(64), 2: bytes(8), 77: b"abc"}
        self.valid = [
            wire.encode_request(1, name, contexts[:batch], budget, 0.0, strategy, tagged)
            for name in ("crest", "rest", "nothing", "")
            for batch, budget in ((0, 4), (1, 64), (8, 300))
            for strategy, tagged in (("", None), ("longest", sections))
        ]
        self.valid += [
            wire.frame(1, 2),
            wire.frame(1, 2, b"token"),
            wire.frame(3, 4),
            wire.frame(0x82, 5, bytes(40)),
            *(wire.frame(4, 6, name) for name in (b"dense", b"rest", b"nothing", b"", bytes(300), b"\xff")),
        ]
        queries = np.random.default_rng(seed).standard_normal((8, PROJECTION.dims)).astype(np.float32)
        queries[2, 3] = np.nan
        for batch, projection in ((1, PROJECTION), (8, PROJECTION), (3, make_projection(seed=1))):
            tagged = Queries(queries[:batch], projection).sections()
            for each in (
                tagged,
                {1: tagged[1]},
                {3: tagged[3]},
                {**tagged, 1: bytes(20)},
                {**tagged, 3: bytes(3)},
            ):
                self.valid.append(wire.encode_request(1, "dense", contexts[:batch], 64, sections=each))
        self.kinds: list[Callable[[], bytes]] = [
            self.mutated, self.mutated, self.mutated_payload, self.mutated_payload, self.cut, self.wrong_length,
            self.wrong_fields, self.wrong_fields, self.noise, self.noisy_payload, self.unchanged,
        ]  # fmt: skip

    def __call__(self) -> bytes:
        return self.random.choice(self.kinds)()

    def unchanged(self) -> bytes:
        return self.random.choice(self.valid)

    def noise(self) -> bytes:
        """Return anything."""
        return self.random.randbytes(self.random.randrange(1, 300))

    def noisy_payload(self) -> bytes:
        """Return anything in a frame."""
        return wire.frame(self.random.randrange(6), self.number(), self.noise())

    def mutated(self) -> bytes:
        """Return a frame with some bytes changed, the header too."""
        return self._change(self.unchanged(), 0)

    def mutated_payload(self) -> bytes:
        """Return a frame with some bytes of the payload changed."""
        return self._change(self.unchanged(), HEADER.size)

    def _change(self, frame: bytes, start: int) -> bytes:
        data = bytearray(frame)
        for _ in range(self.random.randrange(1, 5)):
            if len(data) > start:
                place = self.random.randrange(start, len(data))
                data[place] = self.random.choice((0, 1, 0x7F, 0x80, 0xFF, self.random.randrange(256)))
        return bytes(data)

    def cut(self) -> bytes:
        """Return the beginning of a frame, or a frame whose payload was cut and whose header fits that."""
        frame = self.unchanged()
        part = frame[: self.random.randrange(1, len(frame))]
        if len(part) >= HEADER.size and self.random.random() < 0.8:
            return struct.pack("<I", len(part) - HEADER.size) + part[4:]
        return part

    def wrong_length(self) -> bytes:
        """Return a frame that says it is shorter or longer than it is."""
        frame = self.unchanged()
        most = Limits().payload
        lengths = (0, 1, 15, 16, len(frame), max(len(frame) - 17, 0), most, most + 1, 1 << 24, 2**32 - 1)
        return struct.pack("<I", self.random.choice(lengths)) + frame[4:]

    def wrong_fields(self) -> bytes:
        """Return a draft request with extreme numbers, in a payload of the right length or nearly so."""
        small = self.random.choice((0, 1, 2, 3, 16))
        batch = self.random.choice((0, 1, 2, 255, 512, 513, 65_535))
        width = self.random.choice((0, 1, 16, 17, 300, 4096, 4097, 65_535))
        if batch * width > 10_000:
            batch = 1 if self.random.random() < 0.5 else batch
        budget = self.random.choice((0, 1, 64, 4096, 4097, 65_535))
        min_prob = self.random.choice((0.0, 1.0, 0.5, -1.0, 2.0, float("nan"), float("inf"), 1e-40))
        name = self.random.choice((b"crest", b"rest", b"dense", b"\xff\xfe", b"../../x", b""))
        strategy = self.random.choice((b"", b"longest", b"backoff", b"\0" * 9))
        head = struct.pack("<HHfBBHI", batch, budget, min_prob, len(name), len(strategy), width, small)
        rows = self.random.randbytes(4) * min(batch * width, 10_000)
        payload = head + rows + bytes(small) + name + strategy
        return wire.frame(2, self.number(), payload[: len(payload) - self.random.choice((0, 0, 0, 1))])

    def number(self) -> int:
        return self.random.choice((0, 1, 2**63, 2**64 - 1))


def is_frame(data: bytes) -> bool:
    """Tell whether a stream can go on behind this input."""
    if len(data) < HEADER.size:
        return False
    length, version, *_ = HEADER.unpack_from(data)
    return bool(version == 1 and length == len(data) - HEADER.size <= Limits().payload)


def fuzz(server: ServerProcess, inputs: int, seed: int) -> Counter[Status]:
    """Send inputs and count how they ended. What is a frame gets an answer; what is none ends its connection."""
    fuzzer, statuses, sent = Fuzzer(seed), Counter[Status](), 0
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
    fuzzer = Fuzzer(5)
    callers = [running.caller() for _ in range(200)]
    for caller in callers:
        frame = fuzzer.unchanged()
        caller.send(frame[: fuzzer.random.randrange(1, len(frame))])
    check_answers(running, small_crest, "crest")
    for caller in callers:
        caller.close()
    check_answers(running, small_crest, "crest")


def test_connections_that_end_at_once(running: ServerProcess, small_crest: Path) -> None:
    request = Fuzzer(6).valid[2]
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
