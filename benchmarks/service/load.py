"""A load on the lookup service over several connections, each of which sends again as soon as it is answered.

Every answer is compared with the first one to the same request.
"""

import dataclasses
import gc
import select
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.service.echo import HEADER, STATUS, connect, content, numbered

WARM_UP_SECONDS = 0.5
CONNECTIONS = 16


@dataclasses.dataclass(slots=True, eq=False)
class _Request:
    """A request in flight on a connection."""

    place: int
    number: int
    begun: float
    received: bytes = b""


def run_load(address: str, requests: Sequence[bytes], seconds: float) -> dict[str, Any]:
    """Send frames repeatedly to a Unix socket; return the figures, with latencies in microseconds."""
    idle = [connect(address) for _ in range(CONNECTIONS)]
    under: dict[Any, _Request] = {}
    known: dict[int, bytes] = {}
    problems: Counter[str] = Counter()
    latencies: list[float] = []
    begin, cpu, sent = time.monotonic(), time.process_time(), 0
    counting = begin + WARM_UP_SECONDS
    end = counting + seconds
    gc.disable()
    while (now := time.monotonic()) < end or under:
        while idle and now < end:
            sock = idle.pop()
            under[sock] = _Request(sent % len(requests), sent, now)
            sock.sendall(numbered(requests[sent % len(requests)], sent))
            sent += 1
        if now > end + 10:
            problems["never answered"] += len(under)
            break
        for sock in select.select(list(under), [], [], 0.05)[0]:
            request = under[sock]
            data = sock.recv(1 << 20)
            request.received = request.received + data if request.received else data
            if data and len(request.received) < HEADER.size + HEADER.unpack_from(request.received)[0]:
                continue
            del under[sock]
            problem = _problem(request, known)
            if problem:
                problems[problem] += 1
            elif request.begun >= counting:
                latencies.append(time.monotonic() - request.begun)
            if data:
                idle.append(sock)
    gc.enable()
    spent = time.monotonic() - begin
    for sock in [*idle, *under]:
        sock.close()
    p50, p99 = np.percentile(np.array(latencies or [np.nan]) * 1e6, [50, 99]).tolist()
    return {
        "requests_per_second": round(len(latencies) / seconds),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
        "generator_cpu": round((time.process_time() - cpu) / spent, 2),
        "problems": dict(problems),
    }


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
