"""What goes wrong: processes are killed, the database goes away, the disk is full, and strange bytes come all the time."""

import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.faults.site import NAME, Site
from benchmarks.measure import progress
from draftstore.remote.wire import encode_request

PROGRAMS = ("lookup", "worker", "prefect", "database")
AWAY, FULL = "database away", "disk full"
PAUSE = 0.02
EXTREMES = (None, -1, 2**64, 1e308, "", "\0", "x" * 5000, [], {}, [[1] * 5000], [None])


class Event(NamedTuple):
    """Something that went wrong; times of the monotonic clock."""

    what: str
    begin: float
    end: float


class Faults:
    """Does what is due.

    Attributes:
        events: what was done.
    """

    def __init__(self, site: Site, seconds: float, kills: int, window: float, seed: int) -> None:
        """Plan at random.

        Args:
            site: the system.
            seconds: how long it is disturbed.
            kills: of processes.
            window: seconds that database and disk are away, twice each.
            seed: of all that is drawn.
        """
        self.events: list[Event] = []
        self._site, self._window, self._random = site, window, random.Random(seed)
        what = [PROGRAMS[number % len(PROGRAMS)] for number in range(kills)] + [AWAY] * 2 + [FULL] * 2
        self._random.shuffle(what)
        self._plan = [(seconds * (0.05 + 0.9 * place / len(what)), each) for place, each in enumerate(what)]
        self._threads: list[threading.Thread] = []

    def act(self, now: float) -> None:
        """Do what is due by now, in seconds from the start."""
        while self._plan and self._plan[0][0] <= now:
            _, what = self._plan.pop(0)
            if what in PROGRAMS:
                self._kill(what)
            elif what == AWAY or self._site.disk:
                self._threads.append(
                    threading.Thread(target=self._stop_database if what == AWAY else self._fill_disk)
                )
                self._threads[-1].start()

    def join(self) -> None:
        """Wait until database and disk are back."""
        for thread in self._threads:
            thread.join()

    def _kill(self, name: str) -> None:
        """Kill any process of a program."""
        begin = time.monotonic()
        with suppress(IndexError, psutil.Error):
            victim = self._random.choice(self._site.family(name))
            words = " ".join(victim.cmdline())[:80]
            victim.kill()
            self.events.append(Event(name, begin, begin))
            progress(f"killed of {name}: {words}")

    def _stop_database(self) -> None:
        """Have the database hang for a while."""
        begin, stopped = time.monotonic(), list[psutil.Process]()
        for process in self._site.family("database"):
            with suppress(psutil.Error):
                for each in (process, *process.children(recursive=True)):
                    each.send_signal(signal.SIGSTOP)
                    stopped.append(each)
        time.sleep(self._window)
        for each in stopped:
            with suppress(psutil.Error):
                each.send_signal(signal.SIGCONT)
        self._over(AWAY, begin)

    def _fill_disk(self) -> None:
        """Leave no byte on the small file system for a while."""
        assert self._site.disk
        begin, ballast = time.monotonic(), self._site.disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < begin + self._window:  # what others give back is taken as well
                with suppress(OSError):
                    while True:
                        file.write(bytes(1 << 16))
                time.sleep(0.1)
        ballast.unlink()
        self._over(FULL, begin)

    def _over(self, what: str, begin: float) -> None:
        self.events.append(Event(what, begin, time.monotonic()))
        progress(f"{what} for {self._window:.0f} s")


class Stranger(threading.Thread):
    """Sends bytes that no client sends, to the service's socket and to both HTTP servers.

    Attributes:
        sent: requests by where they went.
    """

    def __init__(self, site: Site, seed: int) -> None:
        super().__init__(daemon=True)
        self.sent: Counter[str] = Counter()
        self._random, self._stopped = random.Random(seed), threading.Event()
        contexts = np.random.default_rng(seed).integers(-2, 500, (8, 16)).astype(np.int32)
        self._frames = [encode_request(1, name, contexts, 64, 0.0, "") for name in (NAME, "nothing")]
        drafts = {"release": NAME, "contexts": [[1, 2, 3]], "budget": 16}
        words = {"prompt": "Once", "max_tokens": 2, "temperature": 0.0}
        lookup, worker = (_address(site.programs[name].url) for name in ("lookup", "worker"))
        self._places: dict[str, tuple[Callable[[], socket.socket], Callable[[], bytes]]] = {
            "frames": (lambda: _unix(site.socket), lambda: self._mutated(self._random.choice(self._frames))),
            "lookup": (lambda: socket.create_connection(lookup, 5), lambda: self._http("/v1/draft", drafts)),
            "worker": (
                lambda: socket.create_connection(worker, 5),
                lambda: self._http("/v1/completions", words),
            ),
        }

    def run(self) -> None:
        """Send."""
        while not self._stopped.wait(PAUSE):
            name = self._random.choice(list(self._places))
            connect, make = self._places[name]
            with suppress(OSError), connect() as sock:
                sock.settimeout(PAUSE)
                sock.sendall(make())
                self.sent[name] += 1
                sock.recv(1 << 16)

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join()

    def _mutated(self, data: bytes) -> bytes:
        """Return bytes with some of them changed, a part of them, or noise."""
        kind = self._random.randrange(3)
        if kind == 0:
            return self._random.randbytes(self._random.randrange(1, 300))
        if kind == 1:
            return data[: self._random.randrange(1, len(data))]
        changed = bytearray(data)
        for _ in range(self._random.randrange(1, 5)):
            changed[self._random.randrange(len(changed))] = self._random.choice((0, 1, 0x7F, 0x80, 0xFF))
        return bytes(changed)

    def _http(self, path: str, fields: dict[str, object]) -> bytes:
        """Return a request with an extreme value, mutated one time of two."""
        body = json.dumps({**fields, self._random.choice([*fields]): self._random.choice(EXTREMES)}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        )
        whole = f"{head}Content-Type: application/json\r\n\r\n".encode() + body
        return self._mutated(whole) if self._random.random() < 0.5 else whole


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def _unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    return sock


def cause(begin: float, end: float, events: Sequence[Event], whats: Sequence[str]) -> bool:
    """Return True if something of these kinds went wrong during a time, or shortly before."""
    return any(event.what in whats and event.begin <= end and event.end >= begin - 10.0 for event in events)
