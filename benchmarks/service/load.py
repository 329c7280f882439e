"""A load on the lookup service over several connections, each with one request in flight.

Without a rate, a connection sends again as soon as it is answered, which shows the peak. With a rate, requests are due
at even intervals whatever the service does, and latency counts from the due time: a stall affects all waiting requests.
Every answer is compared with the first one to the same request.
"""

import dataclasses
import gc
import select
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.service.echo import HEADER, STATUS, connect, content, numbered
from draftstore.remote.client import DEADLINE

WARM_UP_SECONDS = 0.5


class Load(NamedTuple):
    """Frames to send repeatedly to a Unix socket; `rate` in requests per second, None: as soon as answered."""

    address: str
    requests: Sequence[bytes]
    seconds: float
    connections: int = 16
    rate: float | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    """A request in flight on a connection."""

    place: int
    number: int
    due: float
    received: bytes = b""


def run_load(load: Load) -> dict[str, Any]:
    """Run a load to completion; return the figures, with latencies in microseconds."""
    idle = deque(connect(load.address) for _ in range(load.connections))
    under: dict[Any, _Request] = {}
    known: dict[int, bytes] = {}
    problems: Counter[str] = Counter()
    latencies: list[float] = []
    begin, cpu, sent = time.monotonic(), time.process_time(), 0
    counting = begin + WARM_UP_SECONDS
    end = counting + load.seconds
    gc.disable()
    while (now := time.monotonic()) < end or under:
        wait = 0.05
        while idle and now < end:
            due = now if load.rate is None else begin + sent / load.rate
            if due > now:
                wait = due - now
                break
            sock = idle.popleft()
            under[sock] = _Request(sent % len(load.requests), sent, due)
            sock.sendall(numbered(load.requests[sent % len(load.requests)], sent))
            sent += 1
        if now > end + 10:
            problems["never answered"] += len(under)
            break
        for sock in select.select(list(under), [], [], wait)[0]:
            request = under[sock]
            data = sock.recv(1 << 20)
            request.received = request.received + data if request.received else data
            if data and len(request.received) < HEADER.size + HEADER.unpack_from(request.received)[0]:
                continue
            del under[sock]
            problem = _problem(request, known)
            if problem:
                problems[problem] += 1
            elif request.due >= counting:
                latencies.append(time.monotonic() - request.due)
            if data:
                idle.append(sock)
    gc.enable()
    spent = time.monotonic() - begin
    for sock in [*idle, *under]:
        sock.close()
    return _figures(load, np.array(latencies), problems, (time.process_time() - cpu) / spent)


def _problem(request: _Request, known: dict[int, bytes]) -> str:
    """Return the problem with an answer, or an empty string."""
    answer = request.received
    if not answer:
        return "closed"
    if answer[STATUS]:
        return f"status {answer[STATUS]}"
    found = content(answer)
    if HEADER.unpack_from(answer)[-1] != request.number or known.setdefault(request.place, found) != found:
        return "another answer"
    return ""


def _figures(load: Load, seconds: Any, problems: Counter[str], cpu: float) -> dict[str, Any]:
    """Return the figures of a load."""
    p50, p99, p999 = np.percentile(seconds * 1e6 if len(seconds) else [np.nan], [50, 99, 99.9]).tolist()
    return {
        "requests_per_second": round(len(seconds) / load.seconds),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "p99.9_us": round(p999, 1),
        "within_deadline": round(float((seconds <= DEADLINE).mean()), 5),
        "generator_cpu": round(cpu, 2),
        "problems": dict(problems),
    }
