"""The real command `draftstore serve` in a separate process.

with served("--store", small_store) as service, service.caller() as caller:
    answer = caller.draft("small", contexts)
    assert service.get("/readyz")["status"] == "ready"
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests import ROOT
from tests.fakes.lookups import Caller
from tests.fakes.waiting import SECONDS

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Service:
    """A running command."""

    def __init__(self, process: "subprocess.Popen[str]", folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.started: dict[str, Any] = {}

    @property
    def socket(self) -> Path:
        return Path(self.started["socket"])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def caller(self) -> Caller:
        return Caller(self.socket)

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send an HTTP request; return status and body."""
        with closing(self.begin(method, path, body, headers)) as connection:
            answer = connection.getresponse()
            return answer.status, answer.read()

    def begin(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """Send an HTTP request, and read nothing yet."""
        host = self.started["url"].removeprefix("http://").rstrip("/")
        connection = http.client.HTTPConnection(host, timeout=SECONDS)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        return connection

    def get(self, path: str) -> Any:
        """Return the JSON document of a page that should be there."""
        status, body = self.request("GET", path)
        assert status == 200, body
        return json.loads(body)

    def samples(self) -> Samples:
        """Return all metrics by name and labels."""
        status, body = self.request("GET", "/metrics")
        assert status == 200, body
        return read_samples(body)

    def metric(self, name: str, **labels: str) -> float:
        return self.samples()[name, tuple(sorted(labels.items()))]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """End it as an operator would; return the exit status."""
        self.signal(signal.SIGTERM)
        return self.process.wait(SECONDS)


def read_samples(text: bytes) -> Samples:
    """Return the samples of a text for Prometheus by name and labels."""
    families = text_string_to_metric_families(text.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def launch(*arguments: object, folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """Start the command with a socket in a folder, a free port and JSON on standard output."""
    usual = ("--socket", folder / "s", "--http", "127.0.0.1:0", "--notice-seconds", "0")
    return launch_module("draftstore", "serve", *usual, *arguments, folder=folder, **environment)


def launch_module(
    module: str, name: str, *arguments: object, folder: Path, **environment: str
) -> "subprocess.Popen[str]":
    """Start a command of a module with JSON on standard output and its log in a folder."""
    command = [sys.executable, "-m", module, name, "--json", *map(str, arguments)]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=os.environ | environment
        )


@contextmanager
def short_folder() -> Iterator[Path]:
    """Make a folder whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="draftstore-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(*arguments: object, folder: Path | None = None, **environment: str) -> Iterator[Service]:
    """Run the service, and wait until it serves.

    Args:
        arguments: of `draftstore serve`; later options win over those of `launch`.
        folder: of its socket and log; a new one if not given.
        environment: variables of the command.
    """
    with short_folder() as own:
        where = folder or own
        process = launch(*arguments, folder=where, **environment)
        service = Service(process, where)
        with started(service):
            yield service


@contextmanager
def started(service: Service) -> Iterator[None]:
    """Wait until a process tells that it is ready, and see to it that it ends."""
    process = service.process
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"exit status {process.wait(SECONDS)}: {service.log}"
        service.started = json.loads(line)
        yield
    except BaseException:
        sys.stderr.write(service.log)  # pytest shows it with the failure
        raise
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(SECONDS)
        process.stdout.close()


def refusal(*arguments: object, folder: Path) -> str:
    """Run the command where it should not start, and return the one sentence that it says."""
    before = (folder / "log").stat().st_size if (folder / "log").exists() else 0
    process = launch(*arguments, folder=folder)
    out, _ = process.communicate(timeout=SECONDS)
    said = (folder / "log").read_text()[before:]
    assert process.returncode == 1, said
    assert out == ""
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in said
    return line
