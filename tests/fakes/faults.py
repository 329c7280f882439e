"""Lookup services that behave correctly or misbehave on a connection, in threads of the test."""

import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from draftstore.remote import wire
from draftstore.remote.counters import Outcome
from draftstore.stores.registry import Store
from draftstore.trees.batch import DraftBatch
from tests.fakes.waiting import SECONDS

PAUSE = 0.05
"""Seconds that a service asks for which refuses: on a busy machine the next call comes within them, too."""
NAME = "chat"
TOKENIZER = "00000000000000aa" * 4
OTHER = "00000000000000bb" * 4


class Peer:
    """A service's end of one connection."""

    def __init__(self, service: "Service", connection: socket.socket) -> None:
        self.service = service
        self.socket = connection
        self._file = connection.makefile("rb")

    def read(self) -> wire.Frame:
        """Return the next request that is no greeting; greetings are answered."""
        while True:
            head = self._file.read(wire.HEADER.size)
            if not head:
                raise ConnectionError("the client has gone")
            header = wire.read_header(head)
            frame = wire.Frame(header, self._file.read(header.length))
            if frame.header.operation != wire.Operation.HELLO:
                self.service.requests += 1
                return frame
            self.service.greetings.append(frame.payload)
            self.send(self.service.answer(frame))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def wait(self, seconds: float = SECONDS) -> None:
        """Wait, but no longer than the service runs."""
        if self.service.stopping.wait(seconds):
            raise ConnectionError("the service stops")


Behaviour = Callable[[Peer], None]


def right(peer: Peer) -> None:
    """Answer everything as it should be."""
    while True:
        peer.send(peer.service.answer(peer.read()))


class Service:
    """Serves one store under `NAME`, or pretends to: each connection is given to a `Behaviour`.

    Attributes:
        address: where it listens.
        requests: seen so far.
        connections: taken so far.
        greetings: tokens that were presented.
    """

    def __init__(self, store: Store, behave: Behaviour = right, *, tcp: bool = False) -> None:
        self.store = store
        self.behave = behave
        self.tokenizer = TOKENIZER
        self.requests = self.connections = 0
        self.greetings: list[bytes] = []
        self.stopping = threading.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="draftstore-"))
        self._tcp = tcp
        self._place: tuple[str, int] | str = ("127.0.0.1", 0) if tcp else str(self._folder / "s")
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self.start()

    @property
    def address(self) -> str:
        return self._place if isinstance(self._place, str) else f"tcp://{self._place[0]}:{self._place[1]}"

    def start(self) -> None:
        """Listen where it listened before."""
        self.stopping = threading.Event()
        self._listening = socket.socket(socket.AF_INET if self._tcp else socket.AF_UNIX)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind(self._place)
        self._place = self._listening.getsockname()
        self._listening.listen(64)
        self._spawn(self._accept, self._listening)

    def stop(self) -> None:
        """End it as a crash would: nobody listens, every connection is reset."""
        self.stopping.set()
        for each in [self._listening, *self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(SECONDS)
        self._open, self._threads = [], []
        if isinstance(self._place, str):
            Path(self._place).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def answer(self, frame: wire.Frame, *, tokenizer: str = "") -> bytes:
        """Return the right answer to a request, but for what is given."""
        number, operation = frame.header.request_id, frame.header.operation
        if operation == wire.Operation.HELLO:
            return wire.encode_json(operation, number, {"version": 1})
        if operation == wire.Operation.RELEASES:
            described = {"name": NAME, "vocab_size": self.store.manifest.vocab_size}
            return wire.encode_json(operation, number, {"releases": [{"name": "other"}, described]})
        request = wire.decode_request(frame.payload)
        drafter = self.store.drafter(request.strategy) if request.strategy else self.store.drafter()
        drafts = drafter.draft_batch(request.contexts, request.budget, request.min_prob)
        return wire.encode_answer(number, 11, wire.short_hash(tokenizer or self.tokenizer), 5, drafts)

    def _accept(self, listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            self._open.append(connection)
            self.connections += 1
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            self.behave(Peer(self, connection))

    def _spawn(self, function: Callable[[socket.socket], None], argument: socket.socket) -> None:
        def run() -> None:
            with suppress(OSError):  # also ConnectionError: the other side has gone
                function(argument)

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()


def hangs(peer: Peer) -> None:
    """Take requests, and never answer."""
    while True:
        peer.read()


def reads_nothing(peer: Peer) -> None:
    """Take a connection, and leave it at that."""
    peer.wait()


def closes(peer: Peer) -> None:
    """Take a connection and close it."""


def closes_mid_answer(peer: Peer) -> None:
    """Close the connection in the middle of an answer."""
    data = peer.service.answer(peer.read())
    peer.send(data[: len(data) // 2])


def resets_mid_header(peer: Peer) -> None:
    """Reset the connection in the middle of a header."""
    data = peer.service.answer(peer.read())
    peer.send(data[:7])
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def speaks_http(peer: Peer) -> None:
    """Be a web server."""
    peer.read()
    peer.send(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def claims_a_byte_too_many(peer: Peer) -> None:
    """Announce a frame that is longer than any answer to what was requested."""
    frame = peer.read()
    request = wire.decode_request(frame.payload)
    longest = 24 + len(request.contexts) * (16 + 7 * request.budget)
    operation = wire.Operation.DRAFT | wire.ANSWER
    number = frame.header.request_id
    peer.send(struct.pack("<IBBBBQ", longest + 1, wire.VERSION, operation, 0, 0, number))
    peer.wait()


def greets_without_end(peer: Peer) -> None:
    """Send answers to greetings as fast as it goes, and none to requests."""
    peer.read()
    data = wire.encode_json(wire.Operation.HELLO, 0, {}) * 100
    while True:
        peer.send(data)


def answers_another_tokenizer(peer: Peer) -> None:
    """Answer with the drafts of another tokenizer."""
    while True:
        peer.send(peer.service.answer(peer.read(), tokenizer=OTHER))


def drafts_too_few(peer: Peer) -> None:
    """Answer with no drafts at all."""
    while True:
        number = peer.read().header.request_id
        peer.send(wire.encode_answer(number, 11, wire.short_hash(TOKENIZER), 5, DraftBatch.empty(0)))


def drips(peer: Peer) -> None:
    """Answer a byte at a time, one each five milliseconds, all but the last."""
    for byte in peer.service.answer(peer.read())[:-1]:
        peer.send(bytes([byte]))
        peer.wait(0.005)
    peer.wait()


def fails_with(status: wire.Status, retry_after: float = 0.0) -> Behaviour:
    """Refuse everything."""

    def behave(peer: Peer) -> None:
        while True:
            number = peer.read().header.request_id
            failure = wire.Failure(status, retry_after, "because\nof \x1b[31mthis")
            peer.send(wire.encode_failure(wire.Operation.DRAFT, number, failure))

    return behave


def is_late(peer: Peer) -> None:
    """Answer right, but each request only when the next one has come."""
    frame = peer.read()
    while True:
        frame, late = peer.read(), frame
        peer.send(peer.service.answer(late))


def restarts_after(answers: int) -> Behaviour:
    """Close each connection after some answers."""

    def behave(peer: Peer) -> None:
        for _ in range(answers):
            peer.send(peer.service.answer(peer.read()))

    return behave


FAULTS: dict[str, tuple[Behaviour, Outcome]] = {
    "hangs": (hangs, Outcome.TIMEOUT),
    "reads nothing": (reads_nothing, Outcome.TIMEOUT),
    "drips": (drips, Outcome.TIMEOUT),
    "is late": (is_late, Outcome.TIMEOUT),
    "closes": (closes, Outcome.CLOSED),
    "closes mid-answer": (closes_mid_answer, Outcome.CLOSED),
    "resets mid-header": (resets_mid_header, Outcome.CLOSED),
    "http": (speaks_http, Outcome.GARBAGE),
    "claims a byte too many": (claims_a_byte_too_many, Outcome.GARBAGE),
    "greets without end": (greets_without_end, Outcome.GARBAGE),
    "too few drafts": (drafts_too_few, Outcome.INVALID),
    "another tokenizer": (answers_another_tokenizer, Outcome.OTHER_TOKENIZER),
    **{
        status.name.lower().replace("_", " "): (fails_with(status, PAUSE), Outcome[status.name])
        for status in wire.Status
        if status is not wire.Status.OK
    },
}
"""What may go wrong by name: a service that does it, and what the client counts."""
