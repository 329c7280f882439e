"""Faults: processes are killed, the database hangs, the disk is full, and garbage arrives constantly."""

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import psutil

from benchmarks.common import SEED
from benchmarks.faults.site import NAME, Event, Site
from benchmarks.service.echo import connect
from draftstore.remote.wire import encode_request

PROGRAMS = ("lookup", "worker", "prefect", "database")
AWAY, FULL = "database away", "disk full"
PAUSE_SECONDS = 0.02
LATE_SECONDS = 10.0  # until a fault is noticed


def plan(seconds: float) -> list[tuple[float, str]]:
    """Return the schedule of faults: a kill every 18 seconds, mixed with two outages of database and disk."""
    what = [*PROGRAMS * max(1, round(seconds / 18 / len(PROGRAMS))), *[AWAY, FULL] * 2]
    random.Random(SEED).shuffle(what)
    return [(seconds * (0.05 + 0.9 * place / len(what)), each) for place, each in enumerate(what)]


def cause(begin: float, end: float, events: Sequence[Event], whats: Sequence[str]) -> bool:
    """Return True if a fault of these kinds happened during an interval or shortly before."""
    near = [event for event in events if event.begin <= end and event.end >= begin - LATE_SECONDS]
    return any(event.what in whats for event in near)


def disturb(site: Site, what: str, window: float) -> Event:
    """Inject the fault that is due: kill a random process of a program, or disable database or disk for a while."""
    begin = time.monotonic()
    if what == AWAY:
        _hang(site, window)
    elif what == FULL:
        _fill(site, begin + window)
    else:
        with suppress(IndexError, psutil.Error):
            random.choice(site.family(what)).kill()
    return Event(what, begin, time.monotonic())


def _hang(site: Site, window: float) -> None:
    """Stop all processes of the database with a signal, and let them continue after a while."""
    family = site.family("database")
    for process in (stopped := [*family, *(child for each in family for child in each.children())]):
        with suppress(psutil.Error):
            process.suspend()
    time.sleep(window)
    for process in stopped:
        with suppress(psutil.Error):
            process.resume()


def _fill(site: Site, end: float) -> None:
    """Fill the file system of the stores until `end`, unless it is the machine's own."""
    if site.own_disk:
        ballast = site.stores / "ballast"
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < end:  # space freed by others is filled, too
                with suppress(OSError):
                    file.write(bytes(1 << 16))
        ballast.unlink()


def send_strange(site: Site, sent: Counter[str], stopped: threading.Event) -> None:
    """Send garbage to the service's socket and both HTTP servers, and count it, until stopped."""
    draw = random.Random(SEED)
    contexts = np.random.default_rng(SEED).integers(-2, 500, (8, 16)).astype(np.int32)
    valid = {
        "frames": encode_request(1, NAME, contexts, 64, 0.0, ""),
        "lookup": _post("/v1/draft", {"release": NAME, "contexts": [[1, 2, 3]], "budget": 16}),
        "worker": _post("/v1/completions", {"prompt": "Once", "max_tokens": 2, "temperature": 0.0}),
    }
    while not stopped.wait(PAUSE_SECONDS):
        name = draw.choice(list(valid))
        with suppress(OSError), _connect(site, name) as sock:
            sock.settimeout(PAUSE_SECONDS)
            sock.sendall(_mutated(valid[name], draw))
            sent[name] += 1
            sock.recv(1 << 16)


def _connect(site: Site, name: str) -> socket.socket:
    if name == "frames":
        return connect(str(site.socket))
    host, port = site.programs[name].url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 5)


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """Return noise, a truncated request, or a request with some bytes changed."""
    kind = draw.randrange(3)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 300))
    changed = bytearray(data[: draw.randrange(1, len(data))] if kind == 1 else data)
    for _ in range(draw.randrange(1, 5) if kind == 2 else 0):
        changed[draw.randrange(len(changed))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def _post(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body
