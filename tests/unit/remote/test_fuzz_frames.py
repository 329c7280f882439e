"""Service and client accept any bytes: neither crashes or grows, and both work properly afterwards."""

import json
import random
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from draftstore.errors import LookupServiceError
from draftstore.remote import wire
from draftstore.remote.client import RemoteStore
from draftstore.remote.counters import Pauses
from draftstore.remote.wire import HEADER, Operation, Status
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore
from services.lookup.settings import Limits
from tests.fakes.faults import TOKENIZER, Behaviour, Peer, Service
from tests.fakes.lookups import Lookups, contexts_of, serving

NAMES = ("crest", "rest", "dense")
INPUTS = 5_000
AHEAD = 4
"""Requests that a connection has under way."""
MOST = Limits().payload


class Fuzzer:
    """Makes frames like valid ones, mutated, cut, extreme, or noise; the same ones for one seed."""

    def __init__(self, seed: int, valid: Sequence[bytes] = ()) -> None:
        self.random = random.Random(seed)
        self.valid = list(valid)

    def __call__(self) -> bytes:
        frame = self.random.choice(self.valid)
        match self.random.randrange(8):
            case 0:
                return frame
            case 1 | 2:
                return self._changed(frame, 0)
            case 3 | 4:
                return self._changed(frame, min(HEADER.size, len(frame) - 1))
            case 5:
                part = frame[: self.random.randrange(1, len(frame))]
                fits = len(part) >= HEADER.size and self.random.random() < 0.8
                return struct.pack("<I", len(part) - HEADER.size) + part[4:] if fits else part
            case 6:
                lengths = (0, 1, 15, 16, len(frame), MOST, MOST + 1, 1 << 24, 2**32 - 1)
                return struct.pack("<I", self.random.choice(lengths)) + frame[4:]
            case _:
                noise = self.random.randbytes(self.random.randrange(1, 300))
                return self.random.choice((noise, wire.frame(self.random.randrange(6), 2**64 - 1, noise)))

    def _changed(self, frame: bytes, start: int) -> bytes:
        data = bytearray(frame)
        for _ in range(self.random.randrange(1, 5)):
            octets = (0, 1, 0x7F, 0x80, 0xFF, self.random.randrange(256))
            data[self.random.randrange(start, len(data))] = self.random.choice(octets)
        return bytes(data)


class RequestFuzzer(Fuzzer):
    """Makes requests for stores, also with extreme numbers in a payload of the right length or nearly so."""

    def __init__(self, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        contexts = numbers.integers(-2, 500, (8, 16)).astype(np.int32)
        states = numbers.standard_normal((8, 16)).astype(np.float16)
        states[2, 3], states[5, 0] = np.nan, np.inf
        drafts = [
            wire.encode_request(1, name, contexts[:batch], budget, 0.0, strategy, hidden)
            for name in (*NAMES, "nothing", "")
            for batch, budget, strategy in ((0, 4, ""), (1, 64, "longest"), (8, 300, ""))
            for hidden in (None, states[:batch], states[:batch, :3])
        ]
        others = [(1, b""), (1, b"token"), (2, b""), (3, b""), (3, b"x"), (4, b"chat"), (0x82, bytes(40))]
        super().__init__(seed, drafts + [wire.frame(operation, 2, payload) for operation, payload in others])

    def __call__(self) -> bytes:
        return self._extreme() if self.random.random() < 0.2 else super().__call__()

    def _extreme(self) -> bytes:
        choose = self.random.choice
        batch = choose((0, 1, 2, 255, 512, 513, 65_535))
        width = choose((0, 1, 16, 17, 300, 4096, 4097, 65_535))
        size = choose((0, 0, 1, 16, 17, 4096, 2**31, 2**32 - 1))
        budget = choose((0, 1, 64, 4096, 4097, 65_535))
        min_prob = choose((0.0, 1.0, 0.5, -1.0, 2.0, float("nan"), float("inf"), 1e-40))
        name = choose((*map(str.encode, NAMES), b"\xff\xfe", b"../../x", b""))
        strategy = choose((b"", b"longest", b"backoff", b"\0" * 9))
        head = struct.pack("<HHfBBHI", batch, budget, min_prob, len(name), len(strategy), width, size)
        rows = self.random.randbytes(4) * min(batch * width, 10_000)
        states = self.random.randbytes(2) * min(batch * size, 10_000)
        payload = head + rows + states + name + strategy
        return wire.frame(2, 2**63, payload[: len(payload) - choose((0, 0, 0, 1))])


def is_frame(data: bytes) -> bool:
    """Return True if a stream can go on behind this input."""
    if len(data) < HEADER.size:
        return False
    length, version, *_ = HEADER.unpack_from(data)
    return bool(version == wire.VERSION and length == len(data) - HEADER.size <= MOST)


def send_any(running: Lookups, fuzzer: Fuzzer, inputs: int) -> Counter[Status]:
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


@pytest.fixture
def running(small_crest: Path, small_store: Path, small_dense: Path) -> Iterator[Lookups]:
    errors = []
    with serving({"crest": small_crest, "rest": small_store, "dense": small_dense}) as lookups:
        lookups.call(lookups.loop.set_exception_handler, lambda _, context: errors.append(context))
        yield lookups
    assert not errors


def memory() -> int:
    """Return the resident pages of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_any_requests(running: Lookups, small_store: Path) -> None:
    send_any(running, RequestFuzzer(0), INPUTS // 2)
    before = memory()
    statuses = send_any(running, RequestFuzzer(1), INPUTS)
    assert memory() - before < 6_000
    assert min(statuses[Status.OK], statuses[Status.BAD_REQUEST]) > INPUTS / 50, statuses
    assert {Status.NOT_FOUND, Status.TOO_LARGE} <= statuses.keys()
    contexts = contexts_of(small_store, 100)
    with closing(open_store(small_store)) as store, running.caller() as caller:
        expected = wire.encode_answer(0, 0, 0, 0, store.drafter().draft_batch(contexts))
        assert caller.draft_frame("rest", contexts).payload[24:] == expected[HEADER.size + 24 :]


def answers_anything(seed: int) -> Behaviour:
    """Answer with right answers and refusals, most of them damaged."""
    fuzzer = Fuzzer(seed)

    def behave(peer: Peer) -> None:
        while True:
            request = peer.read()
            failure = wire.Failure(fuzzer.random.choice(list(Status)[1:]), 0.001, "because")
            refusal = wire.encode_failure(request.header.operation, request.header.request_id, failure)
            fuzzer.valid = [*[peer.service.answer(request)] * 3, refusal]
            peer.send(fuzzer())

    return behave


def test_any_answers(small_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pauses, "holds", False)
    contexts = contexts_of(small_store, 242)
    with closing(RestStore.open(small_store)) as store, Service(store, answers_anything(2)) as service:
        identity = TokenizerIdentity("small", TOKENIZER)
        client = RemoteStore(service.address, "chat", deadline=0.05, vocab_size=384, tokenizer=identity)
        for start in range(0, 240, 2):
            batch = contexts[start : start + 1 + start % 3]
            drafts = client.drafter().draft(batch, 16)
            assert len(drafts) == len(batch)
            for draft in drafts:
                draft.tree.validate()
                assert len(draft.tree) <= 16
                assert draft.tree.tokens.max(initial=0) < 384
            for ask in (client.releases, client.check):
                with suppress(LookupServiceError):
                    ask(seconds=0.05)
        assert all(client.counters[name] for name in ("answered", "drafted", "garbage", "invalid"))
