"""Real servers for tests: PostgreSQL with a password on its own port, and free ports."""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from schema.db.embedded import find_cluster
from tests.fakes.waiting import SECONDS

MEMORY = Path("/dev/shm")  # much faster to fill and to empty than a disk that others use

PORTS = (12_000, 32_000)
"""Ports that are no service's own here, and lie below the range of connections that go out."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on, from below those that the system gives away by itself.

    Between this call and the use of the port, and while a server restarts, nobody else is given it.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """Make a folder that every account can reach, in memory if there is room for a few clusters."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 << 30
    folder = Path(tempfile.mkdtemp(prefix="draftstore-test-", dir=MEMORY if usable else None))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class PostgresServer:
    """A PostgreSQL server that is reached by address and password, as a server of one's own is.

    The programs are those of the wheel; what the official image does at its first start is done here.
    """

    def __init__(self, folder: Path, password: str, arguments: Sequence[str]) -> None:
        self.port = free_port()
        self.url = f"postgresql://draftstore:{password}@127.0.0.1:{self.port}/draftstore"
        self._arguments = list(arguments)
        self._log = (folder / "postgres.log").open("ab")
        cluster = find_cluster(folder)
        cluster.base.mkdir()
        self.binaries = cluster.programs()
        self._account: dict[str, Any] = {}
        if cluster.uid != os.geteuid():
            self._account = {"user": cluster.uid, "group": cluster.gid, "extra_groups": []}
        self._data = cluster.base / "data"
        self._data.mkdir(mode=0o700)
        secret = cluster.base / "password"
        secret.write_text(password)
        for path in (self._data, secret):
            os.chown(path, cluster.uid, cluster.gid)
        access = ("-U", "draftstore", "--auth=scram-sha-256", f"--pwfile={secret}")
        self._run("initdb", "-D", str(self._data), "--encoding=UTF8", "--locale=C", *access)
        given = b"CREATE DATABASE draftstore;\n\n"
        self._run("postgres", "--single", "-j", "-D", str(self._data), "template1", given=given)
        self.process: subprocess.Popen[bytes] | None = None

    def _run(self, program: str, *arguments: str, given: bytes = b"") -> None:
        command = [str(self.binaries / program), *arguments]
        subprocess.run(command, input=given, check=True, capture_output=True, cwd="/", **self._account)

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        program, *arguments = self._arguments
        self.process = subprocess.Popen(
            [
                str(self.binaries / program), "-D", str(self._data), "-p", str(self.port),
                "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", *arguments,
            ],
            stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, cwd="/", **self._account,
        )  # fmt: skip
        end = time.monotonic() + SECONDS
        while True:
            with suppress(psycopg.OperationalError):
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            assert self.process.poll() is None, Path(self._log.name).read_text()
            assert time.monotonic() < end, "the server does not start"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGQUIT) -> None:
        """Stop it at once, as a crash would (SIGQUIT), or after telling its clients (SIGINT)."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(SECONDS)

    def close(self) -> None:
        """Stop it, and let go of its files."""
        self.stop()
        self._log.close()


@contextmanager
def postgres_server(
    *, password: str = "draftstore", arguments: Sequence[str] = ("postgres",)
) -> Iterator[PostgresServer]:
    """Run a server with an empty database."""
    with reachable_folder() as folder:
        server = PostgresServer(folder, password, arguments)
        try:
            server.start()
            yield server
        finally:
            server.close()
