"""docker-compose.yml and the Dockerfile without a Docker engine.

Every service runs here with its own command, environment and health check, in the order of its dependencies. Only
addresses, ports and folders differ; the wheel's PostgreSQL replaces the image's.
"""

import base64
import graphlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from schema.db.embedded import find_programs
from tests import ROOT
from tests.fakes.servers import PostgresServer, free_port, postgres_server, reachable_folder
from tests.fakes.waiting import until

SECONDS = 300.0

Services = dict[str, dict[str, Any]]
AUTH = "draftstore:secret of this test"


def interpolated(text: str) -> str:
    """Fill in `${NAME:-default}` as compose does where only what has no default is set."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"\$\{PREFECT_AUTH_STRING:\?[^}]*\}", AUTH, text).replace("$$", "$")


@pytest.fixture(scope="module")
def services() -> Services:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    found: Services = yaml.safe_load(interpolated(text))["services"]
    return found


def one_shot(service: dict[str, Any]) -> bool:
    return service.get("restart") == "no"


def test_only_this_machine_reaches_the_services(services: Services) -> None:
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_secrets_come_from_the_environment(services: Services) -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    given = re.findall(r"^[^#\n]*AUTH_STRING: (.*)$", text, re.MULTILINE)
    assert given
    assert all(
        value.startswith('"${PREFECT_AUTH_STRING:?') for value in given
    )  # a default would be known to everybody
    clients = {name for name, service in services.items() if AUTH in service.get("environment", {}).values()}
    assert clients == {"prefect-server", "flows"}


def order(services: Services) -> list[str]:
    """Return the services without a profile so that each comes after those it depends on."""
    usual = {name: service for name, service in services.items() if not service.get("profiles")}
    graph = {name: service.get("depends_on", {}) for name, service in usual.items()}
    return list(graphlib.TopologicalSorter(graph).static_order())


class Machine:
    """Runs the services of the file as processes of this machine."""

    def __init__(self, services: Services, image: dict[str, str], folder: Path, stack: ExitStack) -> None:
        self._services, self._image, self._folder, self._stack = services, image, folder, stack
        self.server_port, health_port = free_port(), free_port()
        self.lookup_port = free_port()
        self.worker_port = free_port()
        self._changes = {
            "0.0.0.0": "127.0.0.1",
            "prefect-server:4200": f"127.0.0.1:{self.server_port}",
            "4200": str(self.server_port),
            "8080": str(health_port),
            "7780": str(self.lookup_port),
            "7781": str(free_port()),
            "8000": str(self.worker_port),
            "/var/lib/": f"{folder}/",
            "/var/cache/": f"{folder}/",
            "/run/": f"{folder}/",
        }
        self._programs = [str(Path(sys.executable).parent)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a service and wait until it is healthy, or has done its work."""
        self.launch(name)
        self.wait(name)

    def launch(self, name: str) -> None:
        """Start a service."""
        service = self._services[name]
        if name == "postgres":
            self._start_postgres(service)
        else:
            log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
            self._running[name] = process = subprocess.Popen(
                self._here(service["command"]),
                cwd=ROOT,
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._stack.callback(self._stop, process)

    def wait(self, name: str) -> None:
        """Wait until a service is healthy, or has done its work."""
        if one_shot(self._services[name]):
            assert self._running[name].wait(SECONDS) == 0, self.log(name)
        else:
            until(lambda: self._is_healthy(name), lambda: f"{name} is not healthy: {self.log(name)}", SECONDS)

    def _start_postgres(self, service: dict[str, Any]) -> None:
        environment = service["environment"]
        server: PostgresServer = self._stack.enter_context(
            postgres_server(password=environment["POSTGRES_PASSWORD"], arguments=service["command"])
        )
        self._changes |= {"postgres:5432": f"127.0.0.1:{server.port}", "5432": str(server.port)}
        # Where the server runs from a copy for its account, the client programs are in the wheel alone.
        self._programs += [str(server.binaries), str(find_programs())]

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a service: the image's, then its own."""
        given = self._services[name].get("environment", {})
        own = {key: "" if value is None else str(value) for key, value in given.items()}
        base = {"PATH": os.pathsep.join([*self._programs, os.defpath]), "HOME": str(self._folder)}
        merged = {**self._image, **own}
        here = base | dict(zip(merged, self._here(list(merged.values())), strict=True))
        here.pop(
            "NUMBA_CACHE_DIR", None
        )  # the kernels of this checkout: to compile them anew takes over a minute
        return here

    def run(self, name: str, command: list[str]) -> None:
        """Run a command in a service, as `docker compose exec` does."""
        ran = subprocess.run(self._here(command), cwd=ROOT, env=self.environment(name), check=False)
        assert ran.returncode == 0, self.log(name)

    def place(self, name: str, here: object) -> None:
        """Have something of this machine stand for a name."""
        self._changes = {name: str(here)} | self._changes

    def _here(self, texts: list[str]) -> list[str]:
        """Change all at once: a port that was chosen may hold the digits of another one."""
        names = re.compile("|".join(map(re.escape, self._changes)))
        return [names.sub(lambda found: self._changes[found[0]], text) for text in texts]

    def _is_healthy(self, name: str) -> bool:
        kind, *command = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        here = self._here(command)
        ran = subprocess.run(here, env=self.environment(name), capture_output=True, check=False)
        process = self._running.get(name)
        assert process is None or process.poll() is None, self.log(name)
        return ran.returncode == 0

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace")[-3_000:] if path.exists() else ""

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def machine(services: Services) -> Iterator[Machine]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    words = shlex.split(" ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE)))
    image = dict(pair.split("=", 1) for pair in words)
    with ExitStack() as stack:
        yield Machine(services, image, stack.enter_context(reachable_folder()), stack)


@pytest.mark.slow
def test_every_service_starts_by_its_own_command_and_a_release_drafts_in_the_worker(
    machine: Machine, services: Services, data: Path, tmp_path: Path
) -> None:
    """The worker on the processor, and with a model that is at hand."""
    model = data / "models" / "stories260K"
    machine.place("HuggingFaceTB/SmolLM2-135M-Instruct", model)
    machine.place("/var/cache/draftstore", "")  # kernels that were compiled here are good enough
    # Prefect wants the extension pg_trgm, which the image's PostgreSQL has, and the wheel's has not.
    database = services["prefect-server"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    machine.place(database, f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    for name in order(services):
        machine.start(name)
    assert "CREATE DATABASE" in machine.log("prefect-database")
    machine.start("prefect-database")  # as the next `docker compose up` does
    assert "CREATE DATABASE" not in machine.log("prefect-database")
    check_that_prefect_has_deployments_and_a_password(machine)
    machine.launch("worker")  # it waits for the release
    make_the_release(machine, tmp_path)
    machine.wait("worker")
    request = urllib.request.Request(
        f"http://127.0.0.1:{machine.worker_port}/v1/completions",
        json.dumps({"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )

    def answer() -> dict[str, Any]:
        with urllib.request.urlopen(request, timeout=60) as response:
            reply: dict[str, Any] = json.load(response)
        assert reply["choices"][0]["text"].startswith(", there was a little girl")
        assert "lookup:chat" in reply["usage"]["draftstore"]["sources"]
        return reply

    # Drafts that take more than 2 ms are not waited for: on a busy machine, an answer may come without any.
    until(lambda: answer()["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0)


def check_that_prefect_has_deployments_and_a_password(machine: Machine) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{machine.server_port}/api/deployments/filter",
        data=b"{}",
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=60)
    request.add_header("Authorization", f"Basic {base64.b64encode(AUTH.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert {deployment["name"] for deployment in json.load(answer)} == {"default"}


def make_the_release(machine: Machine, folder: Path) -> None:
    """Publish a store of what the model of the test says, by the command at the top of the file."""
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    (folder / "chats.jsonl").write_text(json.dumps({"text": text * 2}) + "\n")
    machine.place("/corpora", folder)
    lines = (ROOT / "docker-compose.yml").read_text(encoding="utf-8").splitlines()
    (command,) = (line.partition(" exec flows ")[2] for line in lines if "release=chat" in line)
    machine.run("flows", shlex.split(command))
