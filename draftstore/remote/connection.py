"""A connection of the threaded transport to the lookup service: non-blocking, so that no call exceeds its deadline.

Work in progress at the deadline continues without a waiter: the next call uses a connection that was still being
opened, and a late answer is recognised by its id and dropped.
"""

import errno
import os
import select
import socket
import ssl
from time import monotonic

from draftstore.errors import WireError
from draftstore.remote.addresses import Destination, Endpoint
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.protocol import SILENCE, ConnectionState, RequestFailed
from draftstore.remote.requests import PreparedRequest
from draftstore.remote.tls import TlsSocket
from draftstore.remote.wire import HEADER, Frame

CHUNK = 1 << 16
"""Bytes per read."""
RECORD = 1 << 14
"""Bytes that a read returns if they have arrived; of an encrypted connection no more."""
SPIN = 0.0001
"""Seconds of polling for an answer before sleeping: waking up takes as long as a draft."""
_SELECTABLE = 1024
"""`select` takes file descriptors below this; it is exact to the microsecond, `poll` to the millisecond."""


def start_connecting(endpoint: Endpoint) -> tuple[socket.socket, Destination, bool]:
    """Return a non-blocking socket, its destination, and whether it is connected already."""
    try:
        place = endpoint.pick()
    except OSError as error:
        raise RequestFailed(Outcome.UNREACHABLE, str(error)) from None
    family, address = place
    made = None
    try:
        made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        if family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect(address)
    except BlockingIOError as error:
        assert made is not None
        if error.errno == errno.EINPROGRESS:
            return made, place, False
        made.close()  # a Unix socket with a full queue: waiting does not help
        raise RequestFailed(Outcome.UNREACHABLE, "the service takes no more connections") from None
    except OSError as error:
        if made is not None:
            made.close()
        endpoint.failed(place)
        raise RequestFailed(Outcome.UNREACHABLE, f"no connection: {error}") from error
    return made, place, True


class Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start connecting; see `Transport`.

        Raises:
            RequestFailed: nobody listens there, or no more connections are accepted.
        """
        self._endpoint = endpoint
        self._socket, self._place, self._connected = start_connecting(endpoint)
        counters.add("connections")
        self._channel: socket.socket | TlsSocket = self._socket
        self._tls: TlsSocket | None = None
        self._ready = False
        self._number = self._socket.fileno()
        self._poll = select.poll()
        self._events = select.POLLIN
        self._poll.register(self._number, self._events)
        self._state = ConnectionState(hello, counters)
        self._started = monotonic()
        self._sent = 0  # bytes of the request that was begun
        self.usable = True
        """Whether another request may be sent."""

    def begin(self, request: PreparedRequest) -> bool:
        """Do of `ask`, which must follow, what needs no waiting; return whether the connection is good for it."""
        self.usable = False  # until done: an interrupt must not leave half a frame behind
        try:
            self._get_ready(0.0)
            self._sent = self._send_some(self._state.bytes_of(request))
        except RequestFailed as trouble:
            return trouble.outcome is Outcome.TIMEOUT
        except OSError:
            pass  # `ask` meets it again, and reads why
        return True

    def ask(self, request: PreparedRequest, end: float) -> Frame:
        """Send a request, or what is left of one that was begun, and return its answer or a failure of all of them.

        Args:
            request: the request.
            end: deadline, as `time.monotonic`.

        Raises:
            RequestFailed: no answer arrived.
        """
        self.usable = False
        try:
            self._get_ready(end)
            self._send(request, end)
            return self._receive(request, end)
        except WireError as error:
            raise RequestFailed(Outcome.GARBAGE, str(error)) from None
        except OSError as error:
            raise RequestFailed(Outcome.CLOSED, f"the connection has gone: {error}") from None

    def close(self) -> None:
        """Close it."""
        self.usable = False
        self._channel.close()

    def _get_ready(self, end: float) -> None:
        """Connect and begin encryption, unless that is done."""
        if not self._ready:
            if not self._connected:
                self._finish_connecting(end)
            if self._endpoint.tls is not None:
                self._shake_hands(self._endpoint.tls, end)
            self._ready = True

    def _finish_connecting(self, end: float) -> None:
        """Wait until connected."""
        if not self._wait(end, select.POLLOUT):
            self.usable = monotonic() - self._started < SILENCE
            if not self.usable:
                self._endpoint.failed(self._place)
            raise RequestFailed(Outcome.TIMEOUT, "the connection is not there yet")
        if problem := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._endpoint.failed(self._place)
            raise RequestFailed(Outcome.UNREACHABLE, f"no connection: {os.strerror(problem)}")
        self._connected = True

    def _shake_hands(self, context: ssl.SSLContext, end: float) -> None:
        """Begin an encrypted connection, or go on with that."""
        try:
            if self._tls is None:
                self._tls = TlsSocket(self._socket, context, self._endpoint.address.host)
                self._channel = self._tls
            while wanted := self._tls.shake_hands():
                if monotonic() >= end or not self._wait(end, wanted):
                    self.usable = monotonic() - self._started < SILENCE
                    raise RequestFailed(Outcome.TIMEOUT, "the connection is not there yet")
        except OSError as error:
            self._endpoint.failed(self._place)
            raise RequestFailed(Outcome.UNREACHABLE, f"no encrypted connection: {error}") from error

    def _send(self, request: PreparedRequest, end: float) -> None:
        """Send a request."""
        data = self._state.bytes_of(request)
        sent, self._sent = self._sent, 0
        try:
            sent = sent or self._send_some(data)
            if sent < len(data):
                self._send_slowly(data, sent, end)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reason may have been sent, so read on
        self._state.sent(request, monotonic())

    def _send_some(self, data: bytes | memoryview) -> int:
        """Send without waiting; return the number of bytes sent."""
        try:
            return self._channel.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def _send_slowly(self, data: bytes, sent: int, end: float) -> None:
        """Send the rest of `data` as the service reads it."""
        while sent < len(data):
            if monotonic() >= end or not self._wait(end, select.POLLOUT):
                begun = sent > 0 or (self._tls is not None and self._tls.stuck)
                self.usable = not begun and not self._state.hopeless(monotonic())
                raise RequestFailed(Outcome.TIMEOUT, "the service does not read")
            sent += self._send_some(memoryview(data)[sent:])

    def _receive(self, request: PreparedRequest, end: float) -> Frame:
        """Wait for an answer. It may be there already: a service on the same core runs as soon as it is asked."""
        longest = request.longest_answer
        size = min(HEADER.size + longest, CHUNK) if longest else CHUNK  # memory for more costs time
        late = (
            2 + longest // RECORD
        )  # reads after the deadline, of what has arrived before: others were waited for
        waited = over = False
        while not over:
            try:
                data = self._channel.recv(size)
            except BlockingIOError:
                over = waited and monotonic() >= end  # a part of an encrypted record
                if not (over or (not waited and self._spin(end)) or self._wait(end, select.POLLIN)):
                    break
                waited = True
                continue
            if not data:
                raise RequestFailed(Outcome.CLOSED, "the service closed the connection")
            now = monotonic()
            if (frame := self._state.usual(data, request, now)) is not None:
                self.usable = not self._state.closing
                return frame
            if now >= end:
                late -= 1
                over = late == 0
            for frame in self._state.received(data, now):
                awaited = frame.header.request_id == request.id
                if self._state.settle(frame, awaited):
                    self.usable = awaited and not self._state.closing
                    return frame
        self.usable = not self._state.closing and not self._state.hopeless(monotonic())
        raise RequestFailed(Outcome.TIMEOUT, "no answer in time")

    def _spin(self, end: float) -> bool:
        """Poll for an answer for a moment, yielding the CPU to other processes, perhaps the service."""
        if self._events != select.POLLIN or (self._tls is not None and self._tls.pending()):
            return False
        end = min(end, monotonic() + SPIN)
        while not self._poll.poll(0):
            if monotonic() >= end:
                return False
            os.sched_yield()
        return True

    def _wait(self, end: float, events: int) -> bool:
        """Wait until the socket is ready, polling at least once; return whether it is."""
        if self._tls is not None and events == select.POLLIN and self._tls.pending():
            return True
        if events != self._events:
            self._poll.modify(self._number, events)
            self._events = events
        while True:
            left = end - monotonic()
            if left >= 0.001 or left <= 0 or self._number >= _SELECTABLE:
                ready = bool(self._poll.poll(_millis(left)))
            else:
                reading, writing = ([self._number], []) if events == select.POLLIN else ([], [self._number])
                ready = any(select.select(reading, writing, [], left))
            if ready or left <= 0:
                return ready


def _millis(seconds: float) -> int:
    """Return a timeout for `poll`: whole milliseconds, rounded down, but at least one."""
    return max(int(seconds * 1000), 1) if seconds > 0 else 0
