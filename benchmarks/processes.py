"""Commands that run alongside a benchmark, on free ports, restarted if they end; HTTP requests."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

CHECKOUT = Path(__file__).parent.parent
START_SECONDS = 600.0
"""Time limit of a start in seconds: kernels may have to be compiled."""
STOP_SECONDS = 60.0
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)
"""Exceptions of a request if no service runs or the answer breaks off."""


class Answering:
    """A program that answers each JSON document on its stdin, a line, with one on its stdout."""

    def __init__(
        self, command: Sequence[object], environment: Mapping[str, str], *, stderr: Any = None
    ) -> None:
        """Start it in the first folder of `PYTHONPATH`; `stderr` is a file for its log."""
        self._process = subprocess.Popen(
            [*map(str, command)], cwd=environment["PYTHONPATH"].split(os.pathsep)[0], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer; SystemExit if the program has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"no answer of {self._process.args!r}: see above, or its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Program:
    """A command, `python -m ...`, that runs until the end of a block.

    Attributes:
        name: name of the command in messages.
        log: file of its output.
        url: URL of its HTTP server.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[object],
        log: Path,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log, self.url = name, log, f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", *map(str, arguments)]
        self._environment = {**os.environ, **(environment or {})}
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command, cwd=CHECKOUT, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def revive(self) -> None:
        """Restart it if it has ended, as a service manager does."""
        if self.process.poll() is not None:
            self.process = self._start()

    def family(self) -> list[psutil.Process]:
        """Return its process and all descendants."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true.

        Raises:
            SystemExit: the command has ended, or the wait takes too long.
        """
        end = time.monotonic() + START_SECONDS
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the {self.name} does not start: see {self.log}")
            time.sleep(0.1)

    def wait_until_ready(self) -> Self:
        """Wait until `/readyz` answers 200."""
        self.wait_for(self._is_ready)
        return self

    def _is_ready(self) -> bool:
        try:
            return ask(f"{self.url}/readyz", seconds=5.0)[0] == 200
        except NO_ANSWER:
            return False

    def close(self) -> None:
        """End it with SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def decoding_worker(
    model: Path, log: Path, *options: object, device: str = "cpu", threads: int = 1
) -> Program:
    """Start `draftstore worker`."""
    port = free_port()
    arguments = ("draftstore", "worker", "--model", model, "--device", device, "--port", port, *options)
    return Program("decoding worker", arguments, log, port, {"OMP_NUM_THREADS": str(threads)})


def lookup_service(address: Path, log: Path, *options: object) -> Program:
    """Start `draftstore serve` on a Unix socket, with HTTP."""
    port = free_port()
    arguments = ("draftstore", "serve", "--socket", address, "--http", f"127.0.0.1:{port}", *options)
    return Program("lookup service", arguments, log, port)


def ask(url: str, body: object = None, *, seconds: float = 60.0) -> tuple[int, Any]:
    """Send a GET, or a POST with a JSON body; return the status and the JSON document, None if it is not JSON.

    Raises:
        OSError: no service runs there.
        http.client.HTTPException: the answer breaks off.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


def free_port() -> int:
    """Return a free port of 127.0.0.1, below the ephemeral range."""
    while True:
        port = random.randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
