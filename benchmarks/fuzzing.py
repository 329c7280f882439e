"""Senders of a fuzz: threads that send strange or well-formed requests at a pace, and see that each is answered."""

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from benchmarks.fuzzed import FrameFuzzer, HttpFuzzer, expects_answer, is_frame
from benchmarks.loadwire import connect
from draftstore.errors import WireError
from draftstore.remote.buffer import FrameBuffer
from draftstore.remote.wire import Status

QUIET, VALID, FUZZ = "quiet", "well-formed", "fuzz"
PATIENCE_SECONDS = 60.0
"""Time limit of an answer."""
BRIEF_SECONDS = 0.02
"""Time that a server has to say something to what is no request."""
UNANSWERED, CUT_OFF = "unanswered", "closed without an answer"
EXAMPLES = 10
TICK = 0.05


class Sender(threading.Thread):
    """Sends as it is told, until it has sent enough of the strange.

    Attributes:
        mode: what is sent at present.
        sent: requests by mode.
        ends: how strange requests ended: by status, `UNANSWERED`, `CUT_OFF`, `reset`; `closed` stands for what is no
            request.
    """

    def __init__(self, name: str, count: int, rate: float, send: Callable[[bool], list[str]]) -> None:
        """Prepare.

        Args:
            name: of what it sends.
            count: of strange requests.
            rate: requests a second.
            send: sends strange requests, or well-formed ones, and returns how each ended.
        """
        super().__init__(name=name, daemon=True)
        self.mode = QUIET
        self.sent: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self._count, self._rate, self._send = count, rate, send
        self._stopped = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has sent enough."""
        return self.sent[FUZZ] >= self._count

    def run(self) -> None:
        """Send."""
        due = time.monotonic()
        while not self._stopped.is_set():
            mode = self.mode
            if mode == QUIET or (mode == FUZZ and self.done):
                time.sleep(TICK)
                due = time.monotonic()
                continue
            ends = self._send(mode == FUZZ)
            self.sent[mode] += len(ends)
            if mode == FUZZ:
                self.ends.update(ends)
            due = max(due + len(ends) / self._rate, time.monotonic() - 1.0)
            time.sleep(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join(PATIENCE_SECONDS)


def send_frames(address: str, fuzzer: FrameFuzzer) -> Callable[[bool], list[str]]:
    """Return what sends frames to a socket, several on a connection until one breaks it off."""

    def send(strange: bool) -> list[str]:
        group = [fuzzer() if strange else fuzzer.unchanged() for _ in range(fuzzer.random.randint(1, 4))]
        broken = next((place for place, data in enumerate(group) if not is_frame(data)), None)
        if broken is not None:
            del group[broken + 1 :]
        wanted = len(group) if broken is None else broken
        with connect(address) as sock:
            sock.settimeout(PATIENCE_SECONDS)
            with suppress(OSError):  # a service may close behind what is no frame
                sock.sendall(b"".join(group))
            ends = _take(sock, wanted)
        return [*ends, "closed"] if broken is not None else ends

    return send


def _take(sock: socket.socket, wanted: int) -> list[str]:
    """Return the statuses of the next answers; those that do not come are unanswered."""
    buffer, ends = FrameBuffer(), list[str]()
    with suppress(OSError, WireError):
        while len(ends) < wanted and (data := sock.recv(1 << 20)):
            for frame in buffer.feed(data):
                ends.append(_status(frame.header.status))
    return (ends + [UNANSWERED] * wanted)[:wanted]


def _status(number: int) -> str:
    try:
        return Status(number).name
    except ValueError:
        return f"status {number}"


def send_http(
    address: tuple[str, int], fuzzer: HttpFuzzer, examples: list[str]
) -> Callable[[bool], list[str]]:
    """Return what sends an HTTP request on a connection of its own, which is reset behind it.

    Args:
        address: of the server.
        fuzzer: makes the requests.
        examples: gets some requests that got no answer.
    """

    def send(strange: bool) -> list[str]:
        data = fuzzer() if strange else fuzzer.unchanged()
        whole = expects_answer(data)
        status, silence = "", CUT_OFF
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):  # a server may refuse before it has read all
                sock.sendall(data)
            sock.settimeout(PATIENCE_SECONDS if whole else BRIEF_SECONDS)
            try:
                status = sock.recv(64, socket.MSG_WAITALL if whole else 0)[9:12].decode("ascii", "replace")
            except TimeoutError:
                silence = UNANSWERED
            except OSError:  # reset by a server that had said no before it had read all: what it said is lost
                silence = "reset"
        if whole and not status and len(examples) < EXAMPLES:
            examples.append(f"{silence}: {data[:300]!r}")
        return [status or (silence if whole else "closed")]

    return send


def faults(ends: Counter[str]) -> dict[str, int]:
    """Return those ends that a service must not have: its own errors, and silence."""
    return {end: count for end, count in ends.items() if end in ("INTERNAL", "500", UNANSWERED, CUT_OFF)}


def summary(sender: Sender) -> dict[str, Any]:
    """Return the figures of a sender."""
    return {"sent": dict(sender.sent), "ends": dict(sender.ends), "faults": faults(sender.ends)}
