"""Commands that run until they are stopped, started again whenever they end, as a service manager would; and HTTP."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.service import START_SECONDS, STOP_SECONDS

CHECKOUT = Path(__file__).parent.parent
TROUBLE = (OSError, http.client.HTTPException, ValueError)
"""What a request ends with where nobody answers, or the answer breaks off."""


class Kept:
    """A command that runs until the end of a block.

    Attributes:
        name: of the command, for messages and figures.
        starts: times that it was started.
    """

    def __init__(
        self, name: str, arguments: Sequence[object], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `python -m` with these arguments; what it says goes to a file."""
        self.name, self._log = name, log
        self._command = [sys.executable, "-m", *map(str, arguments)]
        self._environment = {**os.environ, **(environment or {})}
        self.starts = 0
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.starts += 1
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command, cwd=CHECKOUT, env=self._environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def revive(self) -> bool:
        """Start it again if it has ended; return whether it had."""
        if self.process.poll() is None:
            return False
        self.process = self._start()
        return True

    def family(self) -> list[psutil.Process]:
        """Return its process and all that these have started."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def wait_for(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait until something is true.

        Raises:
            SystemExit: the command has ended, or it takes too long.
        """
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                how = f"ended with status {self.process.poll()}" if self.process.poll() else "is not ready"
                raise SystemExit(f"the {self.name} {how}: {self._log} says more")
            time.sleep(0.2)

    def stop(self) -> None:
        """End it, as an operator would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(4 * STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()


def decoding_worker(model: Path, port: int, log: Path, *options: object, threads: int = 1) -> Kept:
    """Start `draftstore worker` on a CPU."""
    told = ("--model", model, "--device", "cpu", "--port", port)
    environment = {"OMP_NUM_THREADS": str(threads)}
    return Kept("decoding worker", ("draftstore", "worker", *told, *options), log, environment)


def ask(
    url: str, body: object = None, *, seconds: float = 60.0, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Send a GET, or a POST with a JSON body; return status and JSON document, None where it is no JSON.

    Raises:
        OSError: nobody answers.
        http.client.HTTPException: the answer breaks off.
    """
    data = None if body is None else json.dumps(body).encode()
    told = {"Content-Type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, told), timeout=seconds) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


def is_ready(url: str) -> bool:
    """Return True if `/readyz` answers 200."""
    try:
        return ask(f"{url}/readyz", seconds=5.0)[0] == 200
    except TROUBLE:
        return False
