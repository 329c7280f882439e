"""The real lookup service for benchmarks and their tests: started as a command, looked at from outside."""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.loadwire import HEADER, connect

START_SECONDS = 120.0
STOP_SECONDS = 20.0
DRAFT_REQUEST = struct.Struct("<HHfBBHI")
"""The fields of a draft request before its contexts."""


class Service:
    """A running service.

    Attributes:
        address: of the Unix socket.
        process: the supervisor.
        port: of HTTP on 127.0.0.1.
    """

    def __init__(self, address: str, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.address = address
        self.process = process
        self.port = port

    def processes(self) -> dict[int, str]:
        """Return supervisor, workers and the others by process id; a worker is one that has stores mapped."""
        found = {self.process.pid: "supervisor"}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(OSError):
                    maps = Path(f"/proc/{child.pid}/maps").read_text()
                    found[child.pid] = "worker" if "suffixes.bin" in maps or "trees.lmdb" in maps else "other"
        return found

    def workers(self) -> list[int]:
        """Return the process ids of the workers."""
        return [pid for pid, role in self.processes().items() if role == "worker"]

    def wait_for(self, names: Sequence[str], seconds: float = START_SECONDS) -> None:
        """Wait until something is answered for every name.

        Raises:
            SystemExit: the service has ended, or takes too long.
        """
        until = time.monotonic() + seconds
        missing = list(names)
        while missing:
            if self.process.poll() is not None:
                raise SystemExit(f"draftstore serve ended with status {self.process.returncode}")
            if time.monotonic() > until:
                raise SystemExit(f"draftstore serve does not answer for {', '.join(missing)}")
            with suppress(OSError):
                missing = [name for name in missing if ask_status(self.address, name) != 0]
            time.sleep(0.05)


@contextmanager
def running(
    stores: Mapping[str, Path] | None = None,
    *,
    releases: Sequence[str] = (),
    workers: int = 1,
    options: Sequence[str] = (),
    log: Path | None = None,
) -> Iterator[Service]:
    """Serve until the end of the block.

    Args:
        stores: directories by the name that they are served under.
        releases: of the catalogue.
        workers: processes that answer.
        options: more for `draftstore serve`.
        log: file for what it says; None: stderr.
    """
    served = [f"--store={name}={path}" for name, path in (stores or {}).items()]
    served += [f"--release={name}" for name in releases]
    with tempfile.TemporaryDirectory(prefix="draftstore-serve-") as folder:
        address, port = f"{folder}/lookup.sock", free_port()
        command = [
            sys.executable, "-m", "draftstore", "serve", *served, "--socket", address,
            "--http", f"127.0.0.1:{port}", "--workers", str(workers), *options,
        ]  # fmt: skip
        with (log or Path(os.devnull)).open("ab") as file:
            output = file if log else sys.stderr
            process = subprocess.Popen(
                command, cwd=Path(__file__).parent.parent, stdout=output, stderr=output
            )
        service = Service(address, process, port)
        try:
            service.wait_for([*(stores or {}), *releases])
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on, from below those that the system gives away by itself."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def ask_status(address: str, name: str) -> int:
    """Ask for one draft and return the status of the answer.

    Raises:
        OSError: nobody answers.
    """
    named = name.encode()
    payload = DRAFT_REQUEST.pack(1, 1, 0.0, len(named), 0, 1, 0) + struct.pack("<i", 1) + named
    with connect(address) as sock:
        sock.settimeout(5)
        sock.sendall(HEADER.pack(len(payload), 1, 2, 0, 0, 1) + payload)
        header = sock.recv(HEADER.size, socket.MSG_WAITALL)
        if len(header) < HEADER.size:
            raise ConnectionError("closed without an answer")
        return int(HEADER.unpack(header)[3])


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used so far; 0 if it is gone."""
    with suppress(psutil.NoSuchProcess):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def pin(pid: int, cores: Iterable[int]) -> None:
    """Keep all threads of a process on some cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
