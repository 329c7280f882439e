"""A load generator for the lookup service, a process of its own: `python -m benchmarks.loadgen JSON`.

Frames are ready made and answers are compared, byte for byte, with those of the build that they name
(benchmarks.loadplan). Each connection has one request under way. Without a rate the loop is closed: a connection sends
again as soon as it is answered, which shows the peak. With a rate, requests fall due at even distances whatever the
service does, and latency counts from then: a stall is felt by all that it kept waiting. It knows the format of frames
from docs/frames.md alone.
"""

import dataclasses
import errno
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loadplan import DURATION, LoadPlan
from benchmarks.loadtally import Tally, latencies
from benchmarks.loadwire import HEADER, Timer, connect

BUILD = struct.Struct("<Q")
ANSWERED, CLOSING = 0x82, 1
STATUSES = (
    "OK", "BAD_REQUEST", "UNAUTHORIZED", "FORBIDDEN", "NOT_FOUND", "TOO_LARGE", "BUSY", "UNAVAILABLE", "INTERNAL",
)  # fmt: skip
RECEIVED = 1 << 18
RECONNECT_SECONDS = 0.01
PATIENCE_SECONDS = 10.0
"""How long answers that are under way at the end are waited for."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What is to be done.

    Attributes:
        address: path of a Unix socket, or host:port.
        plan: what `LoadPlan.save` wrote.
        seconds: how long.
        connections: how many.
        rate: requests a second; None for a closed loop.
        warm_up: seconds before anything counts.
        trace: file for the time and latency of every answer (`load_trace`); None for none.
    """

    address: str
    plan: str
    seconds: float
    connections: int = 16
    rate: float | None = None
    warm_up: float = 0.3
    trace: str | None = None


class Connection:
    """One connection with at most one request under way.

    Attributes:
        frame: place in the plan of the request that is under way; -1 for none.
        due: when that fell due, seconds of the monotonic clock.
        sent: when it was sent.
        served: whether any request was answered.
    """

    __slots__ = ("due", "frame", "number", "received", "sent", "served", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.unsent = b""
        self.frame = -1
        self.number = 0
        self.due = self.sent = 0.0
        self.served = False


class Generator:
    """Sends the frames of a plan over many connections, and looks at every answer."""

    def __init__(self, load: Load) -> None:
        """Connect.

        Raises:
            OSError: nobody answers at the address.
        """
        self._load = load
        self._plan = LoadPlan.load(Path(load.plan))
        self._frames = [bytearray(frame) for frame in self._plan.frames]
        self._kinds = self._plan.kinds.tolist()
        self._expected = _split_answers(self._plan)
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._idle: deque[Connection] = deque()
        self._place = self._number = 0
        self._broken = 0
        self._retry_at = 0.0
        self._counting_from = 0.0
        self.tally = Tally()
        for _ in range(load.connections):
            self._connect()

    def run(self) -> dict[str, Any]:
        """Do all the work and return the figures."""
        stop = _Stop()
        begin = time.monotonic()
        self._counting_from = begin + self._load.warm_up
        end = self._counting_from + self._load.seconds
        cpu = time.process_time()
        if self._load.rate is None:
            self._closed(end, stop)
        else:
            self._paced(begin, end, self._load.rate, stop)
        ended = min(end, time.monotonic())
        cpu = (time.process_time() - cpu) / max(ended - begin, 1e-9)
        self._finish()
        return self._figures(begin, ended, cpu)

    def _closed(self, end: float, stop: "_Stop") -> None:
        """Send on every connection as soon as it is idle."""
        idle = self._idle
        while (now := time.monotonic()) < end and not stop.asked:
            while idle:
                self._send(idle.popleft(), now)
            if self._broken:
                self._reconnect(now)
            for fd, events in self._epoll.poll(0.05):
                self._serve(fd, events)

    def _paced(self, begin: float, end: float, rate: float, stop: "_Stop") -> None:
        """Send at even distances, on the connection that has been idle longest."""
        idle, count, step = self._idle, 0, 1.0 / rate
        timer = Timer(step)
        self._epoll.register(timer.fd, select.EPOLLIN)
        while (now := time.monotonic()) < end and not stop.asked:
            while idle and (due := begin + count * step) <= now:
                count += 1
                self._send(idle.popleft(), due)
            if self._broken:
                self._reconnect(now)
            for fd, events in self._epoll.poll(0.05):
                if fd == timer.fd:
                    timer.clear()
                else:
                    self._serve(fd, events)
        self._epoll.unregister(timer.fd)
        timer.close()
        for _ in range(int((min(end, now) - begin) / step) - count):
            self.tally.problem("never sent")

    def _finish(self) -> None:
        """Take the answers that are still under way."""
        until = time.monotonic() + PATIENCE_SECONDS
        while any(each.frame >= 0 for each in self._connections.values()) and time.monotonic() < until:
            for fd, events in self._epoll.poll(0.05):
                self._serve(fd, events)
        for each in self._connections.values():
            if each.frame >= 0:
                self.tally.problem("never answered")
            each.sock.close()
        self._epoll.close()

    def _send(self, connection: Connection, due: float) -> None:
        """Send the next frame of the plan."""
        place = self._place
        self._place = place + 1 if place + 1 < len(self._frames) else 0
        self._number = number = self._number + 1
        frame = self._frames[place]
        BUILD.pack_into(frame, 8, number)
        connection.frame, connection.number, connection.due = place, number, due
        connection.sent = time.monotonic()
        try:
            done = connection.sock.send(frame)
        except BlockingIOError:
            done = 0
        except OSError:
            self._drop(connection)
            return
        if done < len(frame):
            connection.unsent = bytes(frame[done:])
            self._epoll.modify(connection.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, fd: int, events: int) -> None:
        """Take what has arrived on a connection, and send what is left to be sent."""
        connection = self._connections.get(fd)
        if connection is None:
            return
        try:
            if events & select.EPOLLOUT and connection.unsent:
                connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
                if not connection.unsent:
                    self._epoll.modify(fd, select.EPOLLIN)
            if not events & ~select.EPOLLOUT:
                return
            data = connection.sock.recv(RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        if connection.received:
            data = connection.received + data
        if len(data) >= HEADER.size and len(data) >= HEADER.size + HEADER.unpack_from(data)[0]:
            connection.received = b""
            self._answered(connection, data)
        else:
            connection.received = data

    def _answered(self, connection: Connection, data: bytes) -> None:
        """Judge an answer, and write down how long it took."""
        now = time.monotonic()
        length, version, operation, status, flags, number = HEADER.unpack_from(data)
        place = connection.frame
        counts = connection.due >= self._counting_from
        problem = ""
        if place < 0 or number != connection.number or len(data) != HEADER.size + length or version != 1:
            problem = "out of order"
        elif status:
            problem = STATUSES[status] if status < len(STATUSES) else f"status {status}"
        elif operation != ANSWERED or length < DURATION.stop:
            problem = "malformed"
        else:
            (build,) = BUILD.unpack_from(data, HEADER.size)
            head, tail = self._expected[place].get(build) or (None, b"")
            if (
                data[HEADER.size : HEADER.size + DURATION.start] != head
                or data[HEADER.size + DURATION.stop :] != tail
            ):
                problem = self._plan.explain(place, data[HEADER.size :])
            elif counts:
                self.tally.builds[build] += 1
        if problem:
            self.tally.problem(problem)
        elif counts:
            tally = self.tally
            tally.due.append(connection.due)
            tally.latency.append(now - connection.due)
            tally.since_sent.append(now - connection.sent)
            tally.kind.append(self._kinds[place])
        connection.frame = -1
        connection.served = True
        if problem in ("out of order", "malformed") or flags & CLOSING:
            self._drop(connection)
        else:
            self._idle.append(connection)

    def _connect(self) -> None:
        sock = connect(self._load.address)
        sock.setblocking(False)
        connection = Connection(sock)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self._idle.append(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection, and open another one in its place soon."""
        if connection.frame >= 0:
            self.tally.problem("lost")
        with suppress(ValueError):
            self._idle.remove(connection)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        self._broken += 1
        if not connection.served:  # whoever takes connections and closes them is not asked in a tight loop
            self._retry_at = time.monotonic() + RECONNECT_SECONDS

    def _reconnect(self, now: float) -> None:
        """Open connections in the place of those that broke."""
        if now < self._retry_at:
            return
        while self._broken:
            try:
                self._connect()
            except OSError:
                self.tally.refused += 1
                self._retry_at = now + RECONNECT_SECONDS
                return
            self._broken -= 1

    def _figures(self, begin: float, ended: float, cpu: float) -> dict[str, Any]:
        """Return the figures; times are seconds of the monotonic clock, which all processes share."""
        tally = self.tally
        latency, kinds = np.array(tally.latency), np.array(tally.kind)
        seconds = ended - self._counting_from
        if self._load.trace:
            np.savez(
                self._load.trace, due=tally.due, latency=latency, since_sent=tally.since_sent, kind=kinds
            )
        batches = np.array([kind["batch"] for kind in self._plan.names])
        return {
            "begin": begin,
            "seconds": round(seconds, 3),
            "connections": self._load.connections,
            "rate": self._load.rate,
            "answers": len(latency),
            "answers_per_second": round(len(latency) / seconds, 1),
            "contexts_per_second": round(float(batches[kinds].sum()) / seconds, 1) if len(kinds) else 0.0,
            "latency_us": latencies(latency),
            "since_sent_us": latencies(np.array(tally.since_sent)),
            "by_kind": [
                kind | {"latency_us": latencies(latency[kinds == i])}
                for i, kind in enumerate(self._plan.names)
            ],
            "wrong": sum(count for name, count in tally.problems.items() if name.startswith("wrong")),
            "problems": dict(tally.problems),
            "lost_at": tally.lost,
            "failed_at": tally.failed,
            "refused": tally.refused,
            "builds": {f"{build:016x}": count for build, count in tally.builds.items()},
            "generator_cpu": round(cpu, 3),
        }  # fmt: skip


class _Stop:
    """Whether SIGTERM has asked for an early end; the figures are written all the same."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "asked", True))


def _split_answers(plan: LoadPlan) -> list[dict[int, tuple[bytes, bytes]]]:
    """Return, for each frame and build, the answer before and after the duration that it states."""
    return [
        {build: (answer[: DURATION.start], answer[DURATION.stop :]) for build, answer in answers.items()}
        for answers in plan.answers
    ]


def main() -> None:
    """Run the load that the arguments describe; the last line of stdout is one JSON document."""
    load = Load(**json.loads(sys.argv[1]))
    try:
        generator = Generator(load)
    except OSError as error:
        raise SystemExit(f"{load.address}: {os.strerror(error.errno or errno.EIO)}") from None
    gc.collect()
    gc.disable()
    print("started", flush=True)
    print(json.dumps(generator.run()))


if __name__ == "__main__":
    main()
