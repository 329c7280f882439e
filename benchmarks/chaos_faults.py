"""What goes wrong during a soak: processes are killed, the database goes away, the disk is full; each at its time."""

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.keeping import CHECKOUT
from benchmarks.measure import progress
from schema.home import data_home
from schema.postgres.placement import find_place
from schema.postgres.plan import SERVER_LOCK
from schema.postgres.state import ServerState, server_state

KINDS = (
    "lookup worker", "lookup web", "lookup supervisor", "decoding worker", "flow", "prefect worker", "prefect server",
    "prefect supervisor", "postgres", "database supervisor",
)  # fmt: skip
"""Roles of processes that are killed."""
DATABASE, DISK = "database away", "disk full"
WAYS = ("stop", "kill", "hang")
"""How the database goes away: by `draftstore db stop`, by signal 9 with its supervisor, or by not answering."""
BALLAST = "ballast"
LOCK_SECONDS = 30.0
EDGE = 0.04
"""Part of the time at the beginning and at the end in which nothing is done."""


@dataclasses.dataclass
class Event:
    """Something that was done; times of the monotonic clock.

    Attributes:
        what: role of a killed process, `DATABASE` or `DISK`.
        begin: when.
        end: when it was over; for a kill the same.
        said: details.
    """

    what: str
    begin: float
    end: float
    said: str = ""


@dataclasses.dataclass(order=True)
class Planned:
    """Something that is to be done."""

    due: float
    what: str
    said: str = ""


def plan_faults(seconds: float, kills: int, kinds: Sequence[str], fills: int) -> list[Planned]:
    """Return what is to be done when, in seconds from the start: kills of each kind at even distances, mixed.

    Args:
        seconds: of the soak.
        kills: of each kind.
        kinds: that are killed.
        fills: times that the disk is filled.
    """
    planned = [
        Planned((number + (place + 0.5) / len(kinds)) / kills, kind)
        for place, kind in enumerate(kinds)
        for number in range(kills)
    ]
    planned += [Planned((number + 0.6) / len(WAYS), DATABASE, way) for number, way in enumerate(WAYS)]
    # A worker that starts while there is no database must serve all the same.
    planned += [Planned((number + 0.61) / len(WAYS), "lookup worker") for number in range(len(WAYS))]
    planned += [Planned((number + 0.3) / fills, DISK) for number in range(fills)]
    return sorted(
        dataclasses.replace(each, due=seconds * (EDGE + (1 - 2 * EDGE) * each.due)) for each in planned
    )


class Faults:
    """Does what was planned.

    Attributes:
        events: what was done.
    """

    def __init__(
        self,
        planned: Sequence[Planned],
        roles: Callable[[], dict[int, str]],
        window: float,
        disk: Path | None,
    ) -> None:
        """Prepare.

        Args:
            planned: what is to be done.
            roles: returns the roles of all processes by id.
            window: seconds that database and disk are away.
            disk: folder of a small file system; None: it is not filled.
        """
        self.events: list[Event] = []
        self._planned = [each for each in planned if disk or each.what != DISK]
        self._roles, self._window, self._disk = roles, window, disk
        self._threads: list[threading.Thread] = []

    def act(self, now: float) -> None:
        """Do what is due; a process that does not run just now is killed when it does."""
        due = [each for each in self._planned if each.due <= now]
        if not due:
            return
        pids = {role: pid for pid, role in self._roles().items()}
        for each in due:
            if each.what == DATABASE:
                self._in_thread(lambda way=each.said: self._database_away(way))  # type: ignore[misc]
            elif each.what == DISK:
                self._in_thread(self._fill_disk)
            elif (pid := pids.pop(each.what, 0)) == 0:
                continue
            else:
                begin = time.monotonic()
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.events.append(Event(each.what, begin, begin, str(pid)))
            self._planned.remove(each)

    @property
    def left(self) -> list[str]:
        """What was planned and could not be done."""
        return [each.what for each in self._planned]

    def join(self) -> None:
        """Wait until database and disk are back."""
        for thread in self._threads:
            thread.join()

    def _in_thread(self, do: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=do))
        self._threads[-1].start()

    def _database_away(self, way: str) -> None:
        """Take the database away for a while."""
        event = Event(DATABASE, time.monotonic(), time.monotonic() + self._window, way)
        self.events.append(event)
        base = find_place(data_home()).base
        if way == "hang":
            event.said += f", {_hang(server_state(base), self._window)} processes"
        else:
            with kept_down(base, way) as down:
                event.said += "" if down else ", it came back at once"
                time.sleep(self._window)
        event.end = time.monotonic()
        progress(f"database: {event.said}, {event.end - event.begin:.0f} s")

    def _fill_disk(self) -> None:
        """Leave no byte on the small file system for a while."""
        assert self._disk
        event = Event(DISK, time.monotonic(), time.monotonic() + self._window)
        self.events.append(event)
        ballast, size = self._disk / BALLAST, 0
        end = time.monotonic() + self._window
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < end:  # what others give back is taken as well
                with suppress(OSError):
                    while True:
                        size += file.write(bytes(1 << 16))
                time.sleep(0.1)
        ballast.unlink()
        event.end, event.said = time.monotonic(), f"{size:,} bytes"
        progress(f"disk full: {event.said}")


def _hang(state: ServerState, seconds: float) -> int:
    """Stop all processes of the server by signal, and let them go on after a while; return how many."""
    stopped = []
    with suppress(psutil.Error):
        if state.server:
            server = psutil.Process(state.server)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.Error):
                    process.suspend()
                    stopped.append(process)
    time.sleep(seconds)
    for process in stopped:
        with suppress(psutil.Error):
            process.resume()
    return len(stopped)


@contextmanager
def kept_down(base: Path, way: str) -> Iterator[bool]:
    """Stop or kill the server, and hold the lock that every server of this place needs; yield whether it was had.

    The embedded server is started again by whoever needs it, within a fraction of a second: an outage needs more than
    its end. Supervisors wait for the lock for half a minute, as for a server that takes long to end, and then give up.
    """
    lock, had = os.open(base / SERVER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), False
    ending = _end_server(base, way)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not had and time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                had = True
            except BlockingIOError:
                time.sleep(0.001)
        ending.kill()
        ending.wait()
        yield had
    finally:
        os.close(lock)


def _end_server(base: Path, way: str) -> "subprocess.Popen[bytes]":
    """Start to end the server; return a process that is of no use once it has ended."""
    state = server_state(base)
    # Its supervisor is killed first: it has the lock, and would start the server again at once.
    pids = [str(pid) for pid in (state.supervisor, state.server) if pid]
    command = [sys.executable, "-m", "draftstore", "db", "stop"] if way == "stop" else ["kill", "-9", *pids]
    return subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
