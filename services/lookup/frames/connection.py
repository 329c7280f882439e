"""One connection of a decoder: reads frames, writes answers, takes turns with other connections."""

import asyncio
import dataclasses
import socket
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain
from time import perf_counter
from typing import cast

from draftstore.errors import WireError
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.wire import CLOSING, Frame, Header, LongFrameError, Operation, Status
from services.common.permissions import Grant
from services.lookup.frames.jobs import DraftJob, RequestKind
from services.lookup.frames.turns import Turns, time_slice

LINGER = 1.0
"""Seconds for a client to read the last frame."""
QUIET_LOOKS = 2
"""Number of consecutive checks without data after which a client that was told to reconnect counts as gone."""
_FLAGS = 7
"""Offset of the flags in a frame."""
_DRAFT = int(Operation.DRAFT)
_HELLO = int(Operation.HELLO)
_NOBODY = Header(0, 1, 0, 0, 0, 0)
"""Placeholder for an unreadable header."""


class FrameConnection(asyncio.Protocol):
    """Parses frames and answers them.

    A small request is answered at once, in the callback that received it. A request that takes longer than a time slice
    is processed in pieces, whenever the server gives this connection a turn. No asyncio task is created.
    """

    def __init__(self, turns: Turns, peers: "set[FrameConnection]") -> None:
        """Serve one client.

        Args:
            turns: scheduler of the server.
            peers: open connections; this one joins them if there is room.
        """
        self.turns = turns
        self.grant: Grant | None = None
        self.transport: asyncio.Transport
        self.frames_seen = 0
        self.queued = False
        """Whether it is in the server's queue for a turn."""
        self.waiting = 0
        """Unfinished contexts of its jobs."""
        self.leaving = False
        """Whether its answers tell the client to reconnect to another worker."""
        self._told = False
        self._seen = self._quiet = 0
        self._peers = peers
        self._answerer = turns.answerer
        self._buffer = FrameBuffer(turns.limits.payload)
        self._frames: Iterator[Frame] | None = None  # received but unanswered; reading is paused meanwhile
        self._kind: RequestKind | None = None  # of the draft request before
        self._jobs: deque[DraftJob] = deque()
        self._threads: dict[DraftJob, Future[None]] = {}
        self._open = True  # answers may be written
        self._deaf = False  # after the last frame: further input is dropped
        self._budget = turns.limits.budget
        """Maximum nodes of a draft, unless the token names another limit."""
        self._hello: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether everything received is answered."""
        return not (self._jobs or self._threads or self._frames)

    @property
    def wants_turn(self) -> bool:
        """Whether there is work for a turn."""
        return self._open and bool(self._jobs or self._frames)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a client if there is room."""
        self.transport = transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass
        limits = self.turns.limits
        transport.set_write_buffer_limits(high=limits.write_buffer)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._budget = limits.shared_budget
        if len(self._peers) >= limits.connections:
            message = f"all {limits.connections} connections are in use: try again later"
            self._send_away(self._answerer.refuse(_NOBODY, Status.BUSY, message, self.turns.flags, 1.0))
            return
        self._peers.add(self)
        self._answerer.slot.connections = len(self._peers)
        self.change_grant(self._answerer.permissions.identify(None))
        if self.grant is None:
            self._hello = self.turns.loop.call_later(limits.hello_seconds, self._not_greeted)

    def change_grant(self, grant: Grant | None) -> None:
        """Set the client's grant, and with it the maximum size of requests and drafts."""
        if grant is not None and grant.max_budget is None:
            grant = dataclasses.replace(grant, max_budget=self._budget)
        self.grant = grant
        limits = self.turns.limits
        self._buffer.most = limits.greeting if grant is None else limits.payload
        if grant is not None and self._hello:
            self._hello.cancel()
            self._hello = None

    def data_received(self, data: bytes) -> None:
        """Answer what can be answered at once."""
        if self._deaf:
            return
        if self._frames is not None:
            self._frames = chain(self._frames, self._buffer.feed(data))
        elif self._buffer.empty and (job := self._answerer.repeat(data, self.grant, self._kind)) is not None:
            self.frames_seen += 1
            self._start(job)
        else:
            self._take_all(self._buffer.feed(data))

    def turn(self) -> None:
        """Continue unfinished work for one time slice."""
        if self._jobs:
            self._work()
        frames, self._frames = self._frames, None
        if frames is not None:
            self._take_all(frames)
            self._read_on()

    def _take_all(self, frames: Iterator[Frame]) -> None:
        """Answer frames until the time slice is over."""
        end = perf_counter() + time_slice(len(self._peers))
        try:
            for frame in frames:
                self._take(frame)
                if (not self._open or perf_counter() > end) and (following := next(frames, None)):
                    self._suspend(chain([following], frames))
                    return
        except LongFrameError as error:
            self.dismiss(Status.TOO_LARGE, str(error), error.header)
        except WireError as error:
            self.dismiss(Status.BAD_REQUEST, str(error))

    def _suspend(self, frames: Iterator[Frame]) -> None:
        """Leave the remaining frames for a later turn and pause reading until then."""
        if self._deaf or self.transport.is_closing():
            return
        self._frames = frames
        self.transport.pause_reading()
        self.turns.enqueue(self)

    def _take(self, frame: Frame) -> None:
        """Answer one frame, or queue it."""
        self.frames_seen += 1
        answerer, turns = self._answerer, self.turns
        operation = frame.header.operation
        if operation == _DRAFT:
            job = answerer.begin(frame, self.grant, turns.flags)
            if isinstance(job, bytes):
                self._write(job)
            else:
                self._kind = job.kind
                self._start(job)
        elif operation == _HELLO:
            grant, data = answerer.greet(frame, turns.flags, self._budget)
            if grant is None:
                self._send_away(data)  # one attempt per connection
            else:
                self.change_grant(grant)
                self._write(data)
        else:
            self._write(answerer.answer_other(frame, self.grant, turns.flags))

    def _start(self, job: DraftJob) -> None:
        """Answer a draft request at once, or begin with it."""
        if job.served.blocking:
            self._delegate(job)
        elif job.cost <= time_slice(len(self._peers)):
            job.work(job.batch)
            self._send(job)
        elif self._admit(job):
            self._jobs.append(job)
            if self.turns.idle:  # nobody waits
                self._work()
            if self.wants_turn:
                self.turns.enqueue(self)

    def _send(self, job: DraftJob) -> None:
        """Send the answer of a finished job, then count it while the client wakes up."""
        data = job.encode(self.turns.flags)
        self._write(data)
        job.count(len(data))

    def _write(self, data: bytes) -> None:
        if self.leaving:
            self._told = True
            data = b"".join((data[:_FLAGS], bytes([data[_FLAGS] | CLOSING]), data[_FLAGS + 1 :]))
        if not (self._deaf or self.transport.is_closing()):
            self.transport.write(data)

    def _admit(self, job: DraftJob) -> bool:
        """Queue a job if there is room, else tell the client that the service is busy."""
        turns, limits = self.turns, self.turns.limits
        if (
            turns.waiting + job.batch > limits.waiting or self.waiting + job.batch > limits.waiting_each
        ) and turns.waiting:
            seconds = max(0.005, turns.waiting * job.cost / max(job.left, 1))
            header = Header(job.kind.request_bytes, 1, _DRAFT, 0, 0, job.request_id)
            message = f"too many contexts wait for their turn ({turns.waiting:,}): try again later"
            self._write(
                self._answerer.refuse(
                    header, Status.BUSY, message, turns.flags, seconds, job.kind.stats.figures
                )
            )
            return False
        job.served.acquire()
        self.waiting += job.batch
        turns.count_waiting(job.batch, 1)
        return True

    def _dismiss_job(self, job: DraftJob) -> None:
        """Release the resources of a job."""
        job.served.release()
        self.waiting -= job.batch
        self.turns.count_waiting(-job.batch, -1)

    def _work(self) -> None:
        """Process a piece of the first job, and more while there is time."""
        end = perf_counter() + time_slice(len(self._peers))
        while self._jobs and self._open:
            job = self._jobs[0]
            if job.left:
                job.work(job.fitting(end - perf_counter()))
            if not job.left:
                self._jobs.popleft()
                self._conclude(job)
            if perf_counter() >= end:
                break

    def _conclude(self, job: DraftJob) -> None:
        """Send the answer of a queued job."""
        self._dismiss_job(job)
        self._send(job)

    def _delegate(self, job: DraftJob) -> None:
        """Run a lookup that may wait for a database in a thread."""
        if self._admit(job):
            self._threads[job] = self.turns.delegate(job, self._delegated)

    def _delegated(self, job: DraftJob) -> None:
        """Send the result of a thread; called in the loop."""
        if self._threads.pop(job, None) is not None:
            self._conclude(job)
        else:
            self._dismiss_job(job)  # the client has left

    def pause_writing(self) -> None:
        """Stop answering a client that does not read its answers; disconnect it if it never does."""
        self._open = False
        if not self._deaf:
            self.transport.pause_reading()
            self._set_timer(self.turns.limits.stall_seconds)

    def resume_writing(self) -> None:
        """Continue answering."""
        if self._deaf:
            return
        self._open = True
        self._set_timer(None)
        if self.wants_turn:
            self.turns.enqueue(self)
        self._read_on()

    def _read_on(self) -> None:
        """Resume reading unless there is another reason to pause."""
        if self._open and self._frames is None and not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> None:
        """Treat the client as gone: drop its requests, and close once written answers are sent."""
        self._open, self._deaf = False, True
        self._forget()
        self._set_timer(self.turns.limits.stall_seconds)

    def close(self) -> None:
        """Close once written answers are sent, at the latest after a timeout."""
        if not self.transport.is_closing():
            self._set_timer(self.turns.limits.stall_seconds)
            self.transport.close()

    def close_if_gone(self) -> None:
        """Close if the client was told to reconnect and is idle; a client that stays is served as before."""
        self._quiet = self._quiet + 1 if self._told and self.idle and self.frames_seen == self._seen else 0
        self._seen = self.frames_seen
        if self._quiet > QUIET_LOOKS:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop pending work."""
        self._open, self._deaf = False, True
        self._set_timer(None)
        if self._hello:
            self._hello.cancel()
        self._forget()
        self._peers.discard(self)
        self._answerer.slot.connections = len(self._peers)

    def dismiss(self, status: Status, message: str, header: Header = _NOBODY) -> None:
        """Send an error and close the connection."""
        if not self._deaf:
            self._send_away(self._answerer.refuse(header, status, message, self.turns.flags))

    def _not_greeted(self) -> None:
        self._hello = None
        seconds = self.turns.limits.hello_seconds
        self.dismiss(Status.UNAUTHORIZED, f"no token came within {seconds:g} s: begin with operation HELLO")

    def _send_away(self, data: bytes) -> None:
        """Write the last frame, then read and drop further input: an early close could discard that frame."""
        self._write(data)
        self._open, self._deaf = False, True
        self._forget()
        if self._hello:
            self._hello.cancel()
        if not self.transport.is_closing():
            if self.transport.can_write_eof():  # encrypted connections have no half
                self.transport.write_eof()
            self.transport.resume_reading()
            self._set_timer(LINGER)

    def _forget(self) -> None:
        """Drop unanswered requests; running threads complete, their results are ignored."""
        self._frames = None
        while self._jobs:
            self._dismiss_job(self._jobs.popleft())
        threads, self._threads = self._threads, {}
        for future in threads.values():
            future.cancel()

    def _set_timer(self, seconds: float | None) -> None:
        """Disconnect after a timeout; None cancels it."""
        if self._timer:
            self._timer.cancel()
        self._timer = None if seconds is None else self.turns.loop.call_later(seconds, self.transport.abort)
