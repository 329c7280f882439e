"""A running lookup service for tests, in a thread, and a plain client that sends any bytes.

with serving({"chat": small_store}) as lookups, lookups.caller() as caller:
    answer = caller.draft("chat", contexts)
"""

import select
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftstore.live.store import LiveTarget
from draftstore.remote import wire
from draftstore.stores.registry import open_store
from services.common.permissions import Permissions
from services.lookup.protocol import Clients
from services.lookup.settings import Limits, LookupSettings, Target
from tests.fakes.sites import Loop, Running
from tests.fakes.waiting import SECONDS

T = TypeVar("T")


class Caller:
    """A connection that sends bytes and reads whole frames."""

    def __init__(self, address: Path | tuple[str, int]) -> None:
        self.socket = socket.socket(socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET)
        self.socket.settimeout(SECONDS)
        try:
            self.socket.connect(str(address) if isinstance(address, Path) else address)
        except OSError:
            self.socket.close()
            raise
        self._rest = b""
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
        while True:
            if len(self._rest) >= wire.HEADER.size:
                header = wire.read_header(self._rest)
                end = wire.HEADER.size + header.length
                if len(self._rest) >= end:
                    payload, self._rest = self._rest[wire.HEADER.size : end], self._rest[end:]
                    return wire.Frame(header, payload)
            data = self.socket.recv(1 << 20)
            if not data:
                return None
            self._rest += data

    def answer(self) -> wire.Frame:
        """Return the next frame, which must come."""
        frame = self.receive()
        assert frame is not None, "the server has closed the connection"
        return frame

    def ask(self, data: bytes) -> wire.Frame:
        """Send one request and return its answer."""
        self.send(data)
        return self.answer()

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def draft_frame(
        self, name: str, contexts: NDArray[np.int32], budget: int = 64, strategy: str = ""
    ) -> wire.Frame:
        number = self.next_id()
        frame = self.ask(wire.encode_request(number, name, contexts, budget, strategy=strategy))
        assert frame.header.request_id == number
        return frame

    def draft(self, name: str, contexts: NDArray[np.int32], budget: int = 64) -> wire.DraftAnswer:
        """Return the answer to a request that should succeed."""
        frame = self.draft_frame(name, contexts, budget)
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
        return bool(self._rest or select.select([self.socket], [], [], seconds)[0])


def failure(frame: wire.Frame) -> wire.Failure:
    """Return what a frame says that is no success."""
    assert frame.header.status != wire.Status.OK
    assert frame.header.operation & wire.ANSWER
    return wire.decode_failure(frame.header, frame.payload)


def contexts_of(path: Path, number: int, width: int = 16, seed: int = 0) -> NDArray[np.int32]:
    """Return contexts for a store, int32 [number, width]: short ones, unknown ones; most of them match."""
    salad = np.random.default_rng(seed)
    with closing(open_store(path)) as store:
        vocab_size, rows = store.manifest.vocab_size, store.samples(50).contexts
    contexts = salad.integers(0, min(vocab_size, 60), (number, width), np.int32)
    text = rows[rows >= 0].astype(np.int32)
    for row in range(number):
        if len(text) and row % 4:  # from the store's own text
            start = int(salad.integers(0, max(len(text) - width, 1)))
            piece = text[start : start + width]
            contexts[row, -len(piece) :] = piece
        contexts[row, : int(salad.integers(0, width))] = -1
    return contexts


class Lookups(Running):
    """A service of frames that runs in a thread, and all its parts."""

    def __init__(self, settings: LookupSettings, permissions: Permissions) -> None:
        super().__init__(settings, permissions)
        self.settings = settings
        self.clients = Clients(self.drafting, permissions)
        self._thread = Loop()
        self.loop, self.run = self._thread.loop, self._thread.run
        self.socket = settings.socket
        self.tcp = ("", 0)

    def caller(self, *, tcp: bool = False) -> Caller:
        return Caller(self.tcp if tcp else self.socket)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the thread of the event loop."""

        async def run() -> T:
            return function(*arguments)

        return self.run(run())

    async def listen(self, tls: ssl.SSLContext | None) -> None:
        """Take connections."""
        unix = await self.loop.create_unix_server(self.clients.connect, str(self.socket))
        seconds = self.settings.limits.patience if tls else None
        tcp = await self.loop.create_server(
            self.clients.connect, "127.0.0.1", 0, ssl=tls,
            ssl_handshake_timeout=seconds, ssl_shutdown_timeout=0.1 if tls else None,
        )  # fmt: skip
        self.tcp = tcp.sockets[0].getsockname()  # type: ignore[attr-defined]
        self._servers = unix, tcp
        self._tick()

    async def _leave(self) -> None:
        for server in self._servers:
            server.close()
        await self.clients.close(0.1)

    def close(self) -> None:
        """Close all connections, then the stores."""
        self.run(self._leave())
        self._thread.close()
        super().close()

    def _tick(self) -> None:
        self.clients.close_overdue(self.loop.time())
        self.loop.call_later(0.05, self._tick)


@contextmanager
def serving(
    stores: Mapping[str, Path],
    *,
    permissions: Permissions | None = None,
    limits: Limits | None = None,
    max_budget: int | None = None,
    live: Sequence[LiveTarget] = (),
    tls: ssl.SSLContext | None = None,
) -> Iterator[Lookups]:
    """Run a service in a thread of this process.

    Args:
        stores: directories by the name that they are served under.
        permissions: who may ask for what; without them everybody for everything.
        limits: of requests.
        max_budget: maximum nodes of a draft, also over TCP.
        live: live stores.
        tls: certificate for TCP.
    """
    targets = tuple(Target(name, path) for name, path in stores.items())
    with tempfile.TemporaryDirectory(prefix="draftstore-", ignore_cleanup_errors=True) as folder:
        settings = LookupSettings(
            socket=Path(folder) / "s",
            stores=targets,
            limits=limits or Limits(),
            max_budget=max_budget,
            live=tuple(live),
        )
        lookups = Lookups(settings, permissions or Permissions(None))
        lookups.run(lookups.listen(tls))
        try:
            yield lookups
        finally:
            lookups.close()
