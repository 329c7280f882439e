"""One caller's round trips, in a fresh process: `python -m benchmarks.roundtripprobe JSON`.

The same batches of contexts are asked of the service through `draftstore.remote.client`, of an echo that answers as
many bytes, and of the store in this process, in an order drawn anew for every batch; then so with bare frames in place
of the client, since the service knows who is alone with it; then once more of the store in this process, each after a
pause. Used by benchmarks.lookup_load and benchmarks.roundtrip.
"""

import gc
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import SEED
from benchmarks.echo import echo_frame
from benchmarks.loadplan import DURATION, Question, local_answer
from benchmarks.loadwire import HEADER, connect
from draftstore.remote.client import RemoteStore
from draftstore.remote.wire import encode_request
from draftstore.stores.registry import open_store

WARM_UP = 0.1
"""Part of the batches that is asked before anything counts."""
DEADLINE = 5.0
"""Seconds; a call that is cut off would look fast."""
BUDGET = 64
PAUSE = 0.001
"""Seconds that the caller sleeps before a lookup of the kind "rested": caches forget meanwhile, as a service's do."""
MICROS = struct.Struct("<I")
Calls = dict[str, list[Callable[[], Any]]]
"""Under the name of each kind, a call for each batch."""


class Asked(NamedTuple):
    """What is asked of one store.

    Attributes:
        name: that it is served under.
        path: its directory.
        strategy: how it drafts.
    """

    name: str
    path: str
    strategy: str


class Caller:
    """Sends frames over one connection and takes their answers, with as little else as Python allows."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address)
        self._buffer = bytearray(1 << 22)
        self._view = memoryview(self._buffer)

    def ask(self, frame: bytes) -> int:
        """Send a frame and wait for its answer; return the bytes of that, which `answer` holds."""
        self._socket.sendall(frame)
        received = self._socket.recv_into(self._buffer)
        while received < 16 or received < 16 + HEADER.unpack_from(self._buffer)[0]:
            received += self._socket.recv_into(self._view[received:])
        return received

    def answer(self, size: int) -> bytes:
        """Return the payload of the answer of `size` bytes that came last."""
        return bytes(self._view[HEADER.size : size])

    def close(self) -> None:
        """Close the connection."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def measure(address: str, echo: str, systems: Sequence[Sequence[str]], batches: dict[str, int], contexts: str,
            cores: Sequence[int]) -> dict[str, Any]:  # fmt: skip
    """Time all kinds of calls for every store and batch size.

    Args:
        address: of the service.
        echo: address of the echo.
        systems: fields of `Asked`.
        batches: how many batches of each size.
        contexts: file of int32 [any, 16].
        cores: that this process may run on.
    """
    os.sched_setaffinity(0, cores)
    drawn: NDArray[np.int32] = np.load(contexts)
    rows = []
    for system in systems:
        for size, count in batches.items():
            places = np.arange(count * int(size)) % len(drawn)
            asked = drawn[places].reshape(count, int(size), -1)
            rows.append(_measure_one(address, echo, Asked(*system), asked))
    return {"rows": rows}


def _measure_one(address: str, echo: str, asked: Asked, contexts: NDArray[np.int32]) -> dict[str, Any]:
    """Time all kinds of calls for one store and batch size."""
    question = Question(asked.name, asked.strategy, contexts, BUDGET)
    store = open_store(Path(asked.path))
    local = store.drafter(asked.strategy)
    local.warm_up()
    remote_store = RemoteStore(address, asked.name, deadline=DEADLINE)
    remote_store.check()
    remote = remote_store.drafter(asked.strategy)
    expected = [local_answer(store, question, batch)[1] for batch in contexts]
    frames = [
        encode_request(i, asked.name, batch, BUDGET, 0.0, asked.strategy) for i, batch in enumerate(contexts)
    ]
    echoed = [echo_frame(frame, len(answer)) for frame, answer in zip(frames, expected, strict=True)]
    service, bare = Caller(address), Caller(echo)
    calls: Calls = {
        "client": [partial(remote.draft, batch, BUDGET) for batch in contexts],
        "frames": [partial(service.ask, frame) for frame in frames],
        "echo": [partial(bare.ask, frame) for frame in echoed],
        "in process": [partial(local.draft, batch, BUDGET) for batch in contexts],
    }
    wrong = _compare(calls, service, expected)
    service.close()
    times = _in_turn(calls, ("client", "echo", "in process"))
    remote_store.close()
    service = Caller(address)
    calls["frames"] = [partial(service.ask, frame) for frame in frames]
    times["frames"] = _in_turn(calls, ("frames", "echo", "in process"))["frames"]
    times["stated"] = [
        MICROS.unpack_from(service.answer(call()), DURATION.start)[0] for call in calls["frames"]
    ]
    times["rested"] = _after_pauses(calls["in process"])
    service.close()
    bare.close()
    store.close()
    warm = int(len(contexts) * WARM_UP)
    found = {name: summary(each[warm:]) for name, each in times.items()}
    least = found["echo"]["p50"] + found["in process"]["p50"]
    return {
        "store": asked.name,
        "strategy": asked.strategy,
        "batch": contexts.shape[1],
        "request_bytes": len(frames[0]),
        "answer_bytes": round(sum(map(len, expected)) / len(expected)) + HEADER.size,
        "us": found,
        "ratio": round(found["client"]["p50"] / least, 3),
        "wrong": wrong,
    }


def _compare(calls: Calls, service: Caller, expected: Sequence[bytes]) -> int:
    """Return how many answers differ from what the store answers in this process."""
    wrong = 0
    for place, answer in enumerate(expected):
        found = service.answer(calls["frames"][place]())
        same = all(
            found[part] == answer[part] for part in (slice(DURATION.start), slice(DURATION.stop, None))
        )
        wrong += not same or calls["client"][place]() != calls["in process"][place]()
    return wrong


def _in_turn(calls: Calls, kinds: Sequence[str]) -> dict[str, list[float]]:
    """Time one call of each kind for every batch, in a random order; durations in microseconds."""
    rng = np.random.default_rng(SEED)
    times: dict[str, list[float]] = {name: [] for name in kinds}
    gc.collect()
    gc.disable()
    for place in range(len(calls["client"])):
        for which in rng.permutation(len(kinds)).tolist():
            times[kinds[which]].append(_time(calls[kinds[which]][place]))
    gc.enable()
    return times


def _after_pauses(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Time calls after a pause each; durations in microseconds."""
    times = []
    for call in calls:
        sleep(PAUSE)
        times.append(_time(call))
    return times


def _time(call: Callable[[], Any]) -> float:
    """Return how long a call takes in microseconds."""
    begin = perf_counter_ns()
    call()
    return (perf_counter_ns() - begin) / 1000


def summary(times_us: Sequence[float]) -> dict[str, float]:
    """Summarize durations in microseconds."""
    p25, p50, p99, p999 = np.percentile(times_us, [25, 50, 99, 99.9])
    return {
        "p25": round(p25, 1),
        "p50": round(p50, 1),
        "p99": round(p99, 1),
        "p99.9": round(p999, 1),
        "mean": round(float(np.mean(times_us)), 1),
        "samples": len(times_us),
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
