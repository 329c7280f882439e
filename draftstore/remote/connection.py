"""Connections to the lookup service, one for each thread: a blocking socket with a deadline for each call.

A Unix socket connects immediately. Over a network, name resolution, lost packets and a TLS handshake can exceed the
deadline of a call, so a thread connects: calls wait for it up to their deadlines, and a later one gets the connection.

Answers are validated here: decoders trust drafts, so nothing unchecked leaves the client.
"""

import json
import os
import select
import socket
import ssl
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import DraftstoreError, WireError
from draftstore.remote import wire
from draftstore.remote.addresses import Address
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.wire import ANSWER, HEADER, DraftAnswer, Failure, Frame, Operation, Status, read_header

CHUNK = 1 << 16
"""Bytes per read."""
OPENING_SECONDS = 2.0
"""Time limit in seconds for connecting over a network."""
GREETING = 4096
"""Maximum bytes of the answer to HELLO."""
Tls = bool | str | Path | ssl.SSLContext
"""Whether to encrypt; or a file of trusted certificates, or a context that has them."""
MAX_MESSAGE = 500
"""Maximum characters of a message from the service."""
_OUTCOMES = {int(status): Outcome[status.name] for status in Status if status is not Status.OK}


class Connection:
    """A connected socket, used by one thread at a time.

    Attributes:
        pending: whether an answer is outstanding; no other request can be sent until it arrives.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Take ownership of a connected socket; it is closed with the last reference to this object."""
        connected.setblocking(False)
        self.pending = False
        self._socket = connected
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connected, select.POLLIN)
        self._writable.register(connected, select.POLLOUT)
        self.close = weakref.finalize(self, connected.close)

    def send(self, data: bytes, end: float) -> None:
        """Send a frame by the time `end` of `time.monotonic`; RequestFailed on failure."""
        self.pending = True
        try:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    _wait(self._writable, end)
        except TimeoutError:
            raise RequestFailed(
                Outcome.TIMEOUT, "it does not read requests: it hangs or is overloaded"
            ) from None
        except OSError as error:
            raise RequestFailed(Outcome.CLOSED, f"connection lost: {error}") from None

    def receive(self, most: int, end: float) -> Frame:
        """Return the answer, whose payload has at most `most` bytes; RequestFailed if there is none by `end`."""
        found, header = b"", None
        size = min(HEADER.size + most, CHUNK)  # allocating more takes time
        try:
            _wait(self._readable, end)
            while header is None or len(found) < HEADER.size + header.length:
                if found and monotonic() > end:
                    raise RequestFailed(Outcome.TIMEOUT, "the whole answer did not arrive in time")
                try:
                    data = self._socket.recv(size)
                except (BlockingIOError, ssl.SSLWantReadError):
                    _wait(self._readable, end)
                    continue
                if not data:
                    raise RequestFailed(Outcome.CLOSED, "the connection was closed: is the service stopping?")
                found = found + data if found else data
                if header is None and len(found) >= HEADER.size:
                    header = read_header(found, most)
                    size = max(HEADER.size + header.length - len(found), CHUNK)
        except TimeoutError:
            message = "no answer in time: it hangs, is overloaded, or this is not its draft port"
            raise RequestFailed(Outcome.TIMEOUT, message) from None
        except OSError as error:
            raise RequestFailed(Outcome.CLOSED, f"connection lost: {error}") from None
        except WireError as error:
            raise RequestFailed(Outcome.GARBAGE, str(error)) from None
        if len(found) > HEADER.size + header.length:
            raise RequestFailed(Outcome.GARBAGE, "received more than one answer to a request")
        self.pending = False
        return Frame(header, found[HEADER.size :])

    def shut_down(self) -> None:
        """Shut it down even while in use: a thread that waits for an answer gets none."""
        with suppress(OSError):  # SSLSocket's own shutdown would first end only the encryption
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def _wait(ready: select.poll, end: float) -> None:
    """Wait until a socket is ready, or raise TimeoutError."""
    if not ready.poll(max(end - monotonic(), 0.0) * 1000):
        raise TimeoutError


def open_connection(
    address: Address, number: int, context: ssl.SSLContext | None, hello: bytes, end: float
) -> Connection:
    """Open a connection, or raise RequestFailed if there is none by `end`; name resolution may take longer.

    `number` selects which of the address's places is tried first; the service must accept the frame `hello`, if any.
    """
    try:
        made = _connect(address, number, end)
        if not address.path:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            made.settimeout(max(end - monotonic(), 0.001))
            made = context.wrap_socket(made, server_hostname=address.host)
    except OSError as error:
        message = f"no connection ({error}): is `draftstore serve` running there?"
        raise RequestFailed(Outcome.UNREACHABLE, message) from error
    connection = Connection(made)
    if hello:
        connection.send(hello, end)
        check_answer(connection.receive(GREETING, end), Operation.HELLO, 0)
    return connection


def _connect(address: Address, number: int, end: float) -> socket.socket:
    """Connect to the first place with a listener: a killed service may leave its socket file behind."""
    places = address.places()
    first = number % len(places)
    trouble = OSError()
    for family, place in places[first:] + places[:first]:
        made = socket.socket(family, socket.SOCK_STREAM)
        # A Unix socket with a full queue refuses immediately: waiting does not help.
        made.settimeout(0.0 if address.path else max(end - monotonic(), 0.001))
        try:
            made.connect(place)
        except OSError as error:
            made.close()
            trouble = error
        else:
            return made
    raise trouble


def open_in_thread(
    address: Address, number: int, context: ssl.SSLContext | None, hello: bytes
) -> Future[Connection]:
    """Open a connection in a thread within `OPENING_SECONDS`; see `open_connection`."""
    future: Future[Connection] = Future()

    def run() -> None:
        try:
            future.set_result(open_connection(address, number, context, hello, monotonic() + OPENING_SECONDS))
        except RequestFailed as trouble:
            future.set_exception(trouble)

    try:
        threading.Thread(target=run, name="draftstore-connect", daemon=True).start()
    except RuntimeError as error:  # too many threads, or the interpreter is shutting down
        future.set_exception(RequestFailed(Outcome.UNREACHABLE, f"no thread to connect in: {error}"))
    return future


class _Thread(threading.local):
    """The connection of a thread, and the one being opened for it over a network."""

    connection: Connection | None = None
    opening: Future[Connection] | None = None


class Connections:
    """The connections of a client to one address: one for each thread, none shared with a forked process."""

    def __init__(
        self, address: Address, context: ssl.SSLContext | None, hello: bytes, counters: Counters
    ) -> None:
        """Connect on demand; see `open_connection`."""
        self._address, self._context, self._hello, self._counters = address, context, hello, counters
        self._process = 0
        self.renew()

    def renew(self) -> None:
        """Start without connections in a forked process, which must not use its parent's connections or locks."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._number = self._process + crc32(gethostname().encode())  # in containers, every process may be 1
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._counters.renew()

    def send(self, data: bytes, end: float) -> Connection:
        """Send a frame on this thread's connection, which is opened if there is none; return the connection."""
        mine = self._thread
        if mine.connection is None or mine.connection.pending:  # an earlier answer was too late
            mine.connection = None
            mine.connection = self._opened(mine, end)
            self._counters.add("connections")
            with self._lock:
                self._open.add(mine.connection)
        mine.connection.send(data, end)
        return mine.connection

    def _opened(self, mine: _Thread, end: float) -> Connection:
        if self._address.path:
            return open_connection(self._address, self._number, self._context, self._hello, end)
        opening = mine.opening or open_in_thread(self._address, self._number, self._context, self._hello)
        mine.opening = None
        try:
            return opening.result(max(end - monotonic(), 0.0))
        except TimeoutError:
            mine.opening = opening  # for a later call
            raise RequestFailed(Outcome.TIMEOUT, "no connection in time: is the host up?") from None

    def drop(self, *, failed: bool = False) -> None:
        """Let this thread connect again; after a failure, to the next of the address's places."""
        self._thread.connection = None
        self._number += failed

    def shut_down(self) -> None:
        """Shut all down, even those in use."""
        self.renew()
        with self._lock:
            for connection in self._open:
                connection.shut_down()


def client_context(tls: Tls | None, address: Address) -> ssl.SSLContext | None:
    """Return the TLS context for connections to an address, None if unencrypted; DraftstoreError if impossible."""
    tls = address.tls if tls is None else tls
    if tls is False:
        return None
    if address.path:
        raise DraftstoreError(f"{address} is a Unix socket, which needs no encryption: omit tls=")
    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        return ssl.create_default_context(cafile=None if tls is True else str(tls))
    except OSError as error:
        raise DraftstoreError(
            f"the certificates in {tls} cannot be used: {error.strerror or error}"
        ) from None


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


def read_recalled(payload: bytes, vocab_size: int) -> list[NDArray[np.int32]]:
    """Decode recalled answers; RequestFailed if they are invalid."""
    try:
        return wire.decode_answers(payload, vocab_size)
    except WireError as error:
        raise RequestFailed(Outcome.INVALID, str(error)) from None


def read_releases(payload: bytes) -> list[dict[str, Any]]:
    """Decode the releases in an answer; RequestFailed if it has no list of releases."""
    try:
        return [dict(release) for release in json.loads(payload)["releases"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestFailed(Outcome.GARBAGE, "its answer has no list of releases") from None
