"""Frames that no service should mind: mutated, cut, extreme, or noise."""

import random
import struct
from collections.abc import Callable, Sequence

import numpy as np

from draftstore.drafting.projection import Projection
from draftstore.remote import wire
from draftstore.remote.queries import Queries
from draftstore.remote.wire import HEADER
from services.lookup.limits import Limits

BYTES = (0, 1, 0x7F, 0x80, 0xFF)


class FrameFuzzer:
    """Makes frames of every kind; the same ones for one seed."""

    def __init__(
        self, seed: int, names: Sequence[str], dense: str = "", projections: Sequence[Projection] = ()
    ) -> None:
        """Prepare valid frames.

        Args:
            seed: of all that is drawn.
            names: stores that are served.
            dense: a dense one of them.
            projections: its own, and others.
        """
        self.names = [*(name.encode() for name in (*names, dense)), b"\xff\xfe", b"../../x", b""]
        self.random = random.Random(seed)
        contexts = np.random.default_rng(seed).integers(-2, 500, (8, 16)).astype(np.int32)
        sections = {1: bytes(64), 2: bytes(8), 77: b"abc"}
        self.valid = [
            wire.encode_request(1, name, contexts[:batch], budget, 0.0, strategy, tagged)
            for name in (*names, "nothing", "")
            for batch, budget in ((0, 4), (1, 64), (8, 300))
            for strategy, tagged in (("", None), ("longest", sections))
        ]
        self.valid += [
            wire.frame(1, 2),
            wire.frame(1, 2, b"token"),
            wire.frame(3, 4),
            wire.frame(0x82, 5, bytes(40)),
            *(wire.frame(4, 6, name) for name in (*self.names, b"nothing", bytes(300), b"\xff")),
        ]
        for batch, projection in zip((1, 8, 3), projections, strict=False):
            queries = np.random.default_rng(seed).standard_normal((batch, projection.dims)).astype(np.float32)
            queries[2:3, 3] = np.nan
            tagged = Queries(queries, projection).sections()
            for each in (
                tagged,
                {1: tagged[1]},
                {3: tagged[3]},
                {**tagged, 1: bytes(20)},
                {**tagged, 3: bytes(3)},
            ):
                self.valid.append(wire.encode_request(1, dense, contexts[:batch], 64, sections=each))
        self.kinds: list[Callable[[], bytes]] = [
            self.mutated, self.mutated, self.mutated_payload, self.mutated_payload, self.cut, self.wrong_length,
            self.wrong_fields, self.wrong_fields, self.noise, self.noisy_payload, self.unchanged,
        ]  # fmt: skip

    def __call__(self) -> bytes:
        """Return anything of all that is below."""
        return self.random.choice(self.kinds)()

    def unchanged(self) -> bytes:
        """Return what is well-formed."""
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

    def wrong_fields(self) -> bytes:
        """Return a draft request with extreme numbers, in a payload of the right length or nearly so."""
        small = self.random.choice((0, 1, 2, 3, 16))
        batch = self.random.choice((0, 1, 2, 255, 512, 513, 65_535))
        width = self.random.choice((0, 1, 16, 17, 300, 4096, 4097, 65_535))
        if batch * width > 10_000:
            batch = 1 if self.random.random() < 0.5 else batch
        budget = self.random.choice((0, 1, 64, 4096, 4097, 65_535))
        min_prob = self.random.choice((0.0, 1.0, 0.5, -1.0, 2.0, float("nan"), float("inf"), 1e-40))
        name = self.random.choice(self.names)
        strategy = self.random.choice((b"", b"longest", b"backoff", b"\0" * 9))
        head = struct.pack("<HHfBBHI", batch, budget, min_prob, len(name), len(strategy), width, small)
        rows = self.random.randbytes(4) * min(batch * width, 10_000)
        payload = head + rows + bytes(small) + name + strategy
        return wire.frame(2, self.number(), payload[: len(payload) - self.random.choice((0, 0, 0, 1))])

    def number(self) -> int:
        """Return the number of a request."""
        return self.random.choice((0, 1, 2**63, 2**64 - 1))


def is_frame(data: bytes) -> bool:
    """Return True if a stream can go on behind this input."""
    if len(data) < HEADER.size:
        return False
    length, version, *_ = HEADER.unpack_from(data)
    return bool(version == 1 and length == len(data) - HEADER.size <= Limits().payload)
