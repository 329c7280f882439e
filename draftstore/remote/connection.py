"""A connection to the lookup service that makes nobody wait longer than asked: non-blocking, with a time by which.

What is under way when the time is over goes on without anyone waiting: a connection that is being made is taken up by
the next call, and an answer that comes late is known by its id and dropped.
"""

import errno
import os
import select
import socket
from contextlib import suppress
from time import monotonic

from draftstore.errors import WireError
from draftstore.remote.addresses import Destination, Endpoint
from draftstore.remote.counters import Counters, Outcome
from draftstore.remote.judging import Request, Trouble
from draftstore.remote.wire import CLOSING, Frame, FrameBuffer, Status

SILENCE = 1.0
"""Seconds without a byte after which a connection that owes answers is given up."""
MOST_OWED = 1000
"""Answers that a connection may owe."""
MOST_BYTES = 1 << 20
"""Bytes of the longest answer that is read, unless a longer one can come of what was asked."""
CHUNK = 1 << 16
SPIN = 0.0001
"""Seconds to look for an answer again and again before falling asleep: to be woken takes as long as a draft."""
_SELECTABLE = 1024
"""`select` takes file descriptors below this; it is exact to the microsecond, `poll` to the millisecond."""


def start_connecting(endpoint: Endpoint) -> tuple[socket.socket, Destination, bool]:
    """Return a non-blocking socket, where it leads, and whether it is connected already.

    Raises:
        Trouble: nobody listens there, or no more connections are taken.
    """
    try:
        place = endpoint.pick()
    except OSError as error:
        raise Trouble(Outcome.UNREACHABLE, str(error)) from None
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
        made.close()  # a Unix socket whose queue is full: there is nothing to wait for
        raise Trouble(Outcome.UNREACHABLE, "the service takes no more connections") from None
    except OSError as error:
        if made is not None:
            made.close()
        endpoint.failed(place)
        raise Trouble(Outcome.UNREACHABLE, f"no connection: {error}") from None
    return made, place, True


class Owed:
    """The answers that are still to come on one connection, and since when nothing has come."""

    def __init__(self, counters: Counters, *, greeting: bool) -> None:
        """Start with none, or with that to a greeting."""
        self._ids: set[int] = set()
        self._greeting = greeting
        self._since = 0.0
        self._counters = counters

    def add(self, request: Request, frames: FrameBuffer, now: float) -> None:
        """Note a request, and have its answer read at full length."""
        if not self._ids:
            self._since = now
        self._ids.add(request.id)
        if frames.most < (longest := request.longest_answer):
            frames.most = longest

    def settle(self, frame: Frame, wanted: bool) -> bool:
        """Note an answer; return whether it is one that somebody waits for.

        Raises:
            WireError: nobody asked for it.
        """
        header = frame.header
        if header.request_id in self._ids:
            self._ids.discard(header.request_id)
            if not wanted:
                self._counters.add("late")
            return wanted
        if header.request_id == 0 and header.status != Status.OK:
            return True  # to a greeting, or to the connection as a whole
        if header.request_id or not self._greeting:
            raise WireError(f"an answer to request {header.request_id}, which nobody made")
        self._greeting = False
        return False

    def heard(self, now: float) -> None:
        """Note that something has come."""
        self._since = now

    def hopeless(self, now: float) -> bool:
        """Return whether the connection should be given up."""
        return len(self._ids) > MOST_OWED or (bool(self._ids) and now - self._since > SILENCE)


class Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, endpoint: Endpoint, hello: bytes, counters: Counters) -> None:
        """Start to connect.

        Args:
            endpoint: where.
            hello: a frame to send before the first request; may be empty.
            counters: for answers that come late.

        Raises:
            Trouble: nobody listens there, or no more connections are taken.
        """
        self._endpoint = endpoint
        self._socket, self._place, self._connected = start_connecting(endpoint)
        counters.add("connections")
        self._number = self._socket.fileno()
        self._poll = select.poll()
        self._events = select.POLLIN
        self._poll.register(self._number, self._events)
        self._hello = hello
        self._frames = FrameBuffer(MOST_BYTES)
        self._owed = Owed(counters, greeting=bool(hello))
        self._started = monotonic()
        self.usable = True
        """Whether another request may be sent."""

    def ask(self, request: Request, end: float) -> Frame:
        """Send a request and return its answer, or a failure that concerns the whole connection.

        Args:
            request: what to send.
            end: time, as `time.monotonic` tells it, by which the answer must be here.

        Raises:
            Trouble: there is no answer.
        """
        self.usable = False  # until this is over: an interrupt must not leave half a frame behind
        try:
            if not self._connected:
                self._finish_connecting(end)
            self._send(request, end)
            return self._receive(request.id, end)
        except WireError as error:
            raise Trouble(Outcome.GARBAGE, str(error)) from None
        except OSError as error:
            raise Trouble(Outcome.CLOSED, f"the connection has gone: {error}") from None

    def close(self) -> None:
        """Let go of it."""
        self.usable = False
        self._socket.close()

    def _finish_connecting(self, end: float) -> None:
        """Wait until the connection is there.

        Raises:
            Trouble: it is not, or not yet.
        """
        if not self._wait(end, select.POLLOUT):
            self.usable = monotonic() - self._started < SILENCE
            if not self.usable:
                self._endpoint.failed(self._place)
            raise Trouble(Outcome.TIMEOUT, "the connection is not there yet")
        if problem := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._endpoint.failed(self._place)
            raise Trouble(Outcome.UNREACHABLE, f"no connection: {os.strerror(problem)}")
        self._connected = True

    def _send(self, request: Request, end: float) -> None:
        """Send a request, behind the greeting if it is the first.

        Raises:
            Trouble: the service does not read; the connection is usable if nothing was sent.
        """
        data = self._hello + request.data if self._hello else request.data
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have said why, so read on
            sent = self._send_some(data)
            if sent < len(data):
                self._send_slowly(data, sent, end)
        self._hello = b""
        self._owed.add(request, self._frames, monotonic())

    def _send_some(self, data: bytes | memoryview) -> int:
        """Send what can be sent without waiting; return how many bytes."""
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def _send_slowly(self, data: bytes, sent: int, end: float) -> None:
        """Send the rest of `data` as the service reads.

        Raises:
            Trouble: it does not.
        """
        while sent < len(data):
            if monotonic() >= end or not self._wait(end, select.POLLOUT):
                self.usable = sent == 0 and not self._owed.hopeless(monotonic())
                raise Trouble(Outcome.TIMEOUT, "the service does not read")
            sent += self._send_some(memoryview(data)[sent:])

    def _receive(self, request_id: int, end: float) -> Frame:
        """Wait for the answer.

        Raises:
            Trouble: it does not come in time, or the connection is closed.
            WireError: something else comes.
        """
        over = False
        self._spin(end)
        while not over and self._wait(end, select.POLLIN):
            data = self._socket.recv(CHUNK)
            if not data:
                raise Trouble(Outcome.CLOSED, "the service closed the connection")
            now = monotonic()
            over = now >= end  # what has come by now is read, and no more
            self._owed.heard(now)
            for frame in self._frames.feed(data):
                found, flags = frame.header.request_id, frame.header.flags
                if self._owed.settle(frame, found == request_id):
                    self.usable = found == request_id and not flags & CLOSING
                    return frame
        self.usable = not self._owed.hopeless(monotonic())
        raise Trouble(Outcome.TIMEOUT, "no answer in time")

    def _spin(self, end: float) -> None:
        """Look for an answer for a moment, leaving the processor to whoever wants it: perhaps the service."""
        if self._events != select.POLLIN:
            return
        end = min(end, monotonic() + SPIN)
        while not self._poll.poll(0) and monotonic() < end:
            os.sched_yield()

    def _wait(self, end: float, events: int) -> bool:
        """Wait until the socket can do what is asked, looking at least once; return whether it can."""
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
    """Return a time for `poll`: whole milliseconds, rounded down so that none is too long, but one at least."""
    return max(int(seconds * 1000), 1) if seconds > 0 else 0
