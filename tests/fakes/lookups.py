"""Running lookup servers for tests, in a thread or in a process of its own, and a plain client that sends any bytes.

with serving({"chat": small_store}) as lookups, lookups.caller() as caller:
    answer = caller.draft("chat", contexts)
"""

import asyncio
import os
import select
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from draftstore.remote import wire
from draftstore.remote.buffer import FrameBuffer
from draftstore.stores.registry import open_store
from services.common.permissions import Permissions
from services.common.sockets import BACKLOG
from services.lookup.figures.counting import SharedCounters
from services.lookup.figures.totals import ReleaseTotals
from services.lookup.frames.answering import Answerer
from services.lookup.frames.server import FrameServer
from services.lookup.limits import Limits
from services.lookup.stores.served import OpenStores, open_served
from services.lookup.stores.targets import Target
from services.lookup.stores.warming import load_kernels
from tests import ROOT
from tests.fakes.waiting import SECONDS, until

T = TypeVar("T")


class Caller:
    """A connection that sends what it is told and reads whole frames."""

    def __init__(self, address: Path | tuple[str, int]) -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
        self.socket.settimeout(SECONDS)
        try:
            self.socket.connect(str(address) if isinstance(address, Path) else address)
        except OSError:
            self.socket.close()
            raise
        self._buffer = FrameBuffer()
        self._frames: list[wire.Frame] = []
        self._last_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> wire.Frame | None:
        """Return the next frame, whole; None at the end of the stream."""
        while not self._frames:
            data = self.socket.recv(1 << 20)
            if not data:
                return None
            self._frames += self._buffer.feed(data)
        return self._frames.pop(0)

    def ask(self, data: bytes) -> wire.Frame:
        """Send one request and return its answer."""
        self.send(data)
        answer = self.receive()
        assert answer is not None, "the server has closed the connection"
        return answer

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def draft_frame(
        self,
        name: str,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        strategy: str = "",
    ) -> wire.Frame:
        number = self.next_id()
        frame = self.ask(wire.encode_request(number, name, contexts, budget, min_prob, strategy))
        assert frame.header.request_id == number
        return frame

    def draft(
        self,
        name: str,
        contexts: NDArray[np.int32],
        budget: int = 64,
        min_prob: float = 0.0,
        strategy: str = "",
    ) -> wire.DraftAnswer:
        """Return the answer to a request that should succeed."""
        frame = self.draft_frame(name, contexts, budget, min_prob, strategy)
        assert frame.header.status == wire.Status.OK, frame
        return wire.decode_answer(frame.payload)

    def hello(self, token: str = "") -> wire.Frame:
        return self.ask(wire.frame(wire.Operation.HELLO, self.next_id(), token.encode()))

    def ended(self) -> bool:
        """Return True if the server closes the connection, without another frame."""
        try:
            return self.receive() is None
        except ConnectionResetError:
            return True

    def has_data(self, seconds: float = 0.0) -> bool:
        return bool(self._frames or select.select([self.socket], [], [], seconds)[0])


def failure(frame: wire.Frame | None) -> wire.Failure:
    """Return what a frame says that is no success."""
    assert frame is not None, "the connection ended"
    assert frame.header.status != wire.Status.OK
    assert frame.header.operation & wire.ANSWER
    return wire.decode_failure(frame.header, frame.payload)


def contexts_of(path: Path, number: int, width: int = 16, seed: int = 0) -> NDArray[np.int32]:
    """Return contexts for a store, int32 [number, width]: short ones, unknown ones; most of them match."""
    salad = np.random.default_rng(seed)
    vocab_size = open_manifest_vocab(path)
    contexts = salad.integers(0, min(vocab_size, 60), (number, width), np.int32)
    text = some_tokens(path)
    for row in range(number):
        if len(text) and row % 4:  # from the store's own text
            start = int(salad.integers(0, max(len(text) - width, 1)))
            piece = text[start : start + width]
            contexts[row, -len(piece) :] = piece
        contexts[row, : int(salad.integers(0, width))] = -1
    return contexts


def open_manifest_vocab(path: Path) -> int:
    store = open_store(path)
    try:
        return store.manifest.vocab_size
    finally:
        store.close()


def some_tokens(path: Path) -> NDArray[np.int32]:
    """Return tokens that occur in a store one after the other: of a REST store its text, of a CREST store its keys."""
    store = open_store(path)
    try:
        rows = store.samples(50).contexts
        return rows[rows >= 0].astype(np.int32)
    finally:
        store.close()


class Place(NamedTuple):
    """Where a server listens."""

    socket: Path
    tcp: tuple[str, int]


class Lookups:
    """A server that runs in a thread, and all its parts."""

    def __init__(
        self, place: Place, open_stores: OpenStores, figures: SharedCounters, server: FrameServer
    ) -> None:
        self.place = place
        self.open_stores = open_stores
        self.figures = figures
        self.server = server
        self.loop = server.loop

    @property
    def socket(self) -> Path:
        return self.place.socket

    def caller(self, *, tcp: bool = False) -> Caller:
        return Caller(self.place.tcp if tcp else self.place.socket)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the event loop."""

        async def run() -> T:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)

    def totals(self, name: str = "") -> ReleaseTotals:
        """Return what was counted for a release; without a name what belongs to none."""
        return self.figures.totals()[name]

    def put(self, name: str, path: Path) -> None:
        """Serve a store under a name from now on."""
        served = open_served(Target(name, path))
        self.call(self.open_stores.put, name, served)

    def start_drain(self, seconds: float | None = None) -> "asyncio.Future[None]":
        """Begin to stop; the result is there at the end."""
        return asyncio.run_coroutine_threadsafe(self.server.drain(seconds), self.loop)  # type: ignore[return-value]


def make_sockets(folder: Path) -> tuple[Place, list[socket.socket]]:
    """Return a Unix socket and a TCP socket that listen, and where."""
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(folder / "s"))
    unix.listen(BACKLOG)
    tcp = socket.socket(socket.AF_INET)
    tcp.bind(("127.0.0.1", 0))
    tcp.listen(BACKLOG)
    return Place(folder / "s", tcp.getsockname()), [unix, tcp]


def new_loop(kind: str = "uvloop") -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()


@contextmanager
def serving(
    stores: Mapping[str, Path] | OpenStores,
    *,
    permissions: Permissions | None = None,
    limits: Limits | None = None,
    loop: str = "uvloop",
    tls: ssl.SSLContext | None = None,
) -> Iterator[Lookups]:
    """Run a server in a thread of this process.

    Args:
        stores: directories by the name that they are served under, or the open stores.
        permissions: who may ask for what; without them everybody for everything.
        limits: of requests.
        loop: `uvloop` or `asyncio`.
        tls: certificate for TCP.
    """
    open_stores = stores if isinstance(stores, OpenStores) else OpenStores()
    if not isinstance(stores, OpenStores):
        for name, path in stores.items():
            open_stores.put(name, open_served(Target(name, path)))
    figures = SharedCounters(1)
    answerer = Answerer(
        open_stores, permissions or Permissions.open_to_all(), limits or Limits(), figures.slot(0)
    )
    running = new_loop(loop)
    folder = Path(tempfile.mkdtemp(prefix="draftstore-"))
    place, sockets = make_sockets(folder)
    server = FrameServer(answerer, running)
    server.tls = tls
    server.share(sockets, figures, 0)
    thread = threading.Thread(target=running.run_forever, name="lookups")
    thread.start()
    lookups = Lookups(place, open_stores, figures, server)
    try:
        yield lookups
    finally:
        lookups.call(server.close)
        running.call_soon_threadsafe(running.stop)
        thread.join(SECONDS)
        running.run_until_complete(asyncio.sleep(0.01))
        running.close()
        for listening in sockets:
            listening.close()
        open_stores.close()
        shutil.rmtree(folder, ignore_errors=True)


class ServerProcess(NamedTuple):
    """A server that runs in a process of its own."""

    socket: Path
    process: "subprocess.Popen[bytes]"

    def caller(self) -> Caller:
        return Caller(self.socket)

    def memory(self) -> int:
        """Return its resident memory in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving_process(stores: Mapping[str, Path]) -> Iterator[ServerProcess]:
    """Run a server in another process: `python -m tests.fakes.lookups FOLDER NAME=DIRECTORY...`."""
    folder = Path(tempfile.mkdtemp(prefix="draftstore-"))
    arguments = [f"{name}={path}" for name, path in stores.items()]
    root = ROOT
    load_kernels()  # on disk then: to compile them there may take longer than a test waits
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.lookups", str(folder), *arguments],
            cwd=root,
            stdout=log,
            stderr=log,
        )
    running = ServerProcess(folder / "s", process)

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with suppress(OSError):
            running.caller().close()
            return True
        return False

    try:
        until(answers, "the server does not start")
        yield running
        assert process.poll() is None, (folder / "log").read_text()
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait(SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(folder: Path, stores: Mapping[str, Path]) -> None:
    open_stores = OpenStores()
    for name, path in stores.items():
        open_stores.put(name, open_served(Target(name, path)))
    figures = SharedCounters(1)
    server = FrameServer(Answerer(open_stores, Permissions.open_to_all(), Limits(), figures.slot(0)))
    server.share(make_sockets(folder)[1], figures, 0)
    await asyncio.Event().wait()


if __name__ == "__main__":
    _folder, *_stores = sys.argv[1:]
    uvloop.run(
        _serve(
            Path(_folder),
            {name: Path(path) for name, path in (argument.split("=", 1) for argument in _stores)},
        )
    )
