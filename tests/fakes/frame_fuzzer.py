"""Frames that neither service nor client should mind: mutated, cut, extreme, or noise."""

import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from draftstore.remote import wire
from draftstore.remote.wire import HEADER, Operation, Status
from services.lookup.settings import Limits
from tests.fakes.faults import Behaviour, Peer
from tests.fakes.lookups import Lookups

BYTES = (0, 1, 0x7F, 0x80, 0xFF)
AHEAD = 4
"""Requests that a connection has under way."""


class FrameFuzzer:
    """Makes frames like valid ones; the same ones for one seed.

    Attributes:
        random: draws all that is drawn.
        valid: the valid frames.
    """

    def __init__(self, seed: int, valid: Sequence[bytes] = ()) -> None:
        self.random = random.Random(seed)
        self.valid = list(valid)
        self.kinds: list[Callable[[], bytes]] = [
            self.mutated, self.mutated, self.mutated_payload, self.mutated_payload, self.cut, self.wrong_length,
            self.noise, self.noisy_payload, self.unchanged,
        ]  # fmt: skip

    def __call__(self) -> bytes:
        """Return anything of all that is below."""
        return self.random.choice(self.kinds)()

    def unchanged(self) -> bytes:
        return self.random.choice(self.valid)

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.randrange(1, 300))

    def noisy_payload(self) -> bytes:
        return wire.frame(self.random.randrange(6), self.number(), self.noise())

    def mutated(self) -> bytes:
        """Return a frame with some bytes changed, the header too."""
        return self._change(self.unchanged(), 0)

    def mutated_payload(self) -> bytes:
        return self._change(self.unchanged(), HEADER.size)

    def _change(self, frame: bytes, start: int) -> bytes:
        data = bytearray(frame)
        for _ in range(self.random.randrange(1, 5) if len(data) > start else 0):
            place = self.random.randrange(start, len(data))
            data[place] = self.random.choice((*BYTES, self.random.randrange(256)))
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

    def number(self) -> int:
        """Return the number of a request."""
        return self.random.choice((0, 1, 2**63, 2**64 - 1))


class RequestFuzzer(FrameFuzzer):
    """Makes requests for stores."""

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self.names = [*(name.encode() for name in names), b"\xff\xfe", b"../../x", b""]
        numbers = np.random.default_rng(seed)
        contexts = numbers.integers(-2, 500, (8, 16)).astype(np.int32)
        states = numbers.standard_normal((8, 16)).astype(np.float16)
        states[2, 3], states[5, 0] = np.nan, np.inf
        drafts = [
            wire.encode_request(1, name, contexts[:batch], budget, 0.0, strategy, hidden)
            for name in (*names, "nothing", "")
            for batch, budget, strategy in ((0, 4, ""), (1, 64, "longest"), (8, 64, ""), (8, 300, ""))
            for hidden in (None, states[:batch], states[:batch, :3])
        ]
        others = [(1, b""), (1, b"token"), (2, b""), (3, b""), (3, b"x"), (4, b"chat"), (0x82, bytes(40))]
        super().__init__(seed, drafts + [wire.frame(operation, 2, payload) for operation, payload in others])
        self.kinds += [self.wrong_fields, self.wrong_fields]

    def wrong_fields(self) -> bytes:
        """Return a draft request with extreme numbers, in a payload of the right length or nearly so."""
        choose = self.random.choice
        batch = choose((0, 1, 2, 255, 512, 513, 65_535))
        width = choose((0, 1, 16, 17, 300, 4096, 4097, 65_535))
        size = choose((0, 0, 1, 16, 17, 4096, 2**31, 2**32 - 1))
        budget = choose((0, 1, 64, 4096, 4097, 65_535))
        min_prob = choose((0.0, 1.0, 0.5, -1.0, 2.0, float("nan"), float("inf"), 1e-40))
        name, strategy = choose(self.names), choose((b"", b"longest", b"backoff", b"\0" * 9))
        head = struct.pack("<HHfBBHI", batch, budget, min_prob, len(name), len(strategy), width, size)
        rows = self.random.randbytes(4) * min(batch * width, 10_000)
        states = self.random.randbytes(2) * min(batch * size, 10_000)
        payload = head + rows + states + name + strategy
        return wire.frame(2, self.number(), payload[: len(payload) - choose((0, 0, 0, 1))])


def is_frame(data: bytes) -> bool:
    """Return True if a stream can go on behind this input."""
    if len(data) < HEADER.size:
        return False
    length, version, *_ = HEADER.unpack_from(data)
    return bool(version == 1 and length == len(data) - HEADER.size <= Limits().payload)


def send_any(running: Lookups, fuzzer: FrameFuzzer, inputs: int) -> Counter[Status]:
    """Send inputs and count how they ended. What is a frame gets an answer; what is none ends its connection."""
    statuses, sent = Counter[Status](), 0
    while sent < inputs:
        with running.caller() as caller:
            whole = True
            while whole and sent < inputs:
                group: list[bytes] = []
                while whole and len(group) < fuzzer.random.randint(1, AHEAD):
                    group.append(fuzzer())
                    whole = is_frame(group[-1])
                sent += len(group)
                caller.send(b"".join(group))
                for data in group if whole else group[:-1]:
                    frame = caller.receive()
                    assert frame, "no answer to a frame"
                    assert frame.header.request_id == wire.read_header(data).request_id
                    statuses[read_status(frame)] += 1
            caller.socket.shutdown(1)
            while frame := caller.receive():
                assert not whole
                statuses[read_status(frame)] += 1
    return statuses


def read_status(frame: wire.Frame) -> Status:
    """Read an answer as a client does, and return how the request ended."""
    assert frame.header.operation & wire.ANSWER
    if frame.header.status:
        failure = wire.decode_failure(frame.header, frame.payload)
        assert failure.status != Status.INTERNAL, failure
        assert failure.message
    elif frame.header.operation == Operation.DRAFT | wire.ANSWER:
        wire.decode_answer(frame.payload, 384)
    else:
        assert isinstance(json.loads(frame.payload), dict)
    return Status(frame.header.status)


def answers_anything(seed: int) -> Behaviour:
    """Answer with right answers and refusals, most of them damaged."""
    fuzzer = FrameFuzzer(seed)

    def behave(peer: Peer) -> None:
        while True:
            asked = peer.read()
            failure = wire.Failure(fuzzer.random.choice(list(Status)[1:]), 0.001, "because")
            refusal = wire.encode_failure(asked.header.operation, asked.header.request_id, failure)
            fuzzer.valid = [*[peer.service.answer(asked)] * 3, refusal]
            peer.send(fuzzer())

    return behave
