"""A real Prefect server, pool and worker, as `make prefect` starts them, and the deployments of prefect.yaml."""

import base64
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from draftstore.storage.files import locked_directory
from draftstore.storage.manifest import load_manifest, verify_files
from draftstore.stores.crest.store import CrestStore
from draftstore.text.tokenizer import load_tokenizer
from pipelines import QUIET
from pipelines.local import main, prefect_environment
from pipelines.secret import AUTH_FILE, SecretError, auth_string
from pipelines.supervision import Restarts, end_left_over, prefect_command
from schema.database import connect
from schema.home import HOME_VARIABLE
from tests import ROOT
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes.servers import free_port
from tests.fakes.waiting import until
from tests.unit.hf.test_loading import model_folder

__all__ = ["model_folder"]  # a fixture

SECONDS = 300.0
ON_DEMAND: dict[str, dict[str, Any]] = {
    "build-dresd": {"model": "/models/chat"},
    "generate-responses": {
        "name": "chat", "model": "/models/chat", "questions": {"prompts": ["/data/prompts.jsonl"]},
    },
}  # fmt: skip
"""What runs of a flow must name."""


class Local:
    """`python -m pipelines.local up` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.state = folder / "prefect"
        self.log = folder / "up.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "pipelines.local", "up",
                    "--port", str(self.port), "--state", str(self.state),
                ],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_until_up(self) -> None:
        """Wait until it says what to do next."""
        end = time.monotonic() + SECONDS
        while "Ctrl-C stops everything" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.2)

    def wait_until_healthy(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            except OSError:
                assert time.monotonic() < end, self.output()
                time.sleep(0.2)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def prefect(self, *arguments: str) -> str:
        """Run `prefect` against the server; return what it printed."""
        ran = subprocess.run(
            prefect_command(*arguments),
            cwd=ROOT,
            env=prefect_environment(self.state, self.url),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}{self.output()}"
        return ran.stdout

    @property
    def secret(self) -> str:
        return (self.state / AUTH_FILE).read_text(encoding="utf-8").strip()

    def send(self, path: str, body: Any, **headers: str) -> Any:
        """Send the server's API a request with these headers and no other."""
        headers["Content-Type"] = "application/json"
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60)

    def ask(self, path: str, **body: Any) -> Any:
        """Ask the server's API."""
        with self.send(path, body, Authorization=basic(self.secret)) as answer:
            return json.load(answer)

    def refusal(self, path: str, body: Any, **headers: str) -> int:
        """Return the status with which the server refuses a request."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.send(path, body, **headers)
        refused.value.close()
        return refused.value.code

    def stop(self, number: int = signal.SIGINT) -> int:
        """Press Ctrl-C; return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def processes(self) -> dict[int, str]:
        """Return the command lines of processes that work for this server, by their ids."""
        mark = f"PREFECT_API_URL={self.url}".encode()
        found = {}
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                try:
                    if mark in (process / "environ").read_bytes().split(b"\0"):
                        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[int(process.name)] = command
                except OSError:
                    continue
        return found


def basic(secret: str) -> str:
    """Return the header `Authorization` for a user and password."""
    return f"Basic {base64.b64encode(secret.encode()).decode()}"


class Channel(ThreadingHTTPServer):
    """What a webhook of a chat gets."""

    def __init__(self) -> None:
        self.texts: queue.Queue[str] = queue.Queue()
        channel = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                channel.texts.put(json.loads(self.rfile.read(length))["text"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel]:
    """Have notices sent to a channel of the test's own."""
    from pipelines.upkeep import URL_VARIABLE

    with Channel() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv(URL_VARIABLE, f"http://127.0.0.1:{server.server_port}/hook")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str, channel: Channel
) -> Iterator[Local]:
    """Start everything, with a data folder and a database of the test's own."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    found = Local(tmp_path)
    try:
        found.wait_until_up()
        yield found
    finally:
        if found.process.poll() is None:
            found.stop(signal.SIGTERM)


def crest_parameters(folder: Path) -> dict[str, Any]:
    """Return parameters that make build-crest quick."""
    return {
        "name": "own",
        "corpus": {"paths": [str(write_texts(folder / "texts.jsonl", 60))]},
        "tokenizer": str(small_tokenizer_folder(folder / "tokenizer")),
        "ngrams": 300,
    }


def released(name: str) -> Path:
    """Return the store that a release points at."""
    query = "SELECT path FROM releases JOIN builds ON builds.id = build_id WHERE releases.name = %s"
    with connect() as connection:
        ((path,),) = connection.execute(query, [name]).fetchall()
    return Path(path)


def require_closed(local: Local, deployment: str) -> None:
    """Check that pages of other sites and users without the password have nothing run."""
    secret = local.secret
    assert (local.state / AUTH_FILE).stat().st_mode & 0o777 == 0o600
    for command in local.processes().values():
        assert secret not in command
    start = f"deployments/{deployment}/create_flow_run"
    evil = {"job_variables": {"command": "touch pwned"}}
    assert local.refusal("deployments/filter", {}) == 401
    assert local.refusal(start, evil, Origin="https://evil.example") == 401
    assert local.refusal(start, evil, Authorization=basic("draftstore:wrong")) == 401

    # What runs is the deployment's own, for those with the password too.
    for variable in ({"command": "touch pwned"}, {"env": {"PYTHONPATH": "/tmp"}}, {"working_dir": "/"}):
        assert local.refusal(start, {"job_variables": variable}, Authorization=basic(secret)) == 422
    pool = local.ask("work_pools/filter")[0]
    assert pool["name"] == "draftstore"
    assert "{{" not in json.dumps(pool["base_job_template"])

    for origin, allowed in (
        ("https://evil.example", None),
        (f"http://localhost:{local.port}", f"http://localhost:{local.port}"),
    ):
        with local.send("deployments/filter", {}, Origin=origin, Authorization=basic(secret)) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
    with urllib.request.urlopen(f"{local.url.removesuffix('/api')}/ui-settings", timeout=60) as answer:
        assert json.load(answer)["auth"] == "BASIC"  # the page asks for the password


def require_scheduled(local: Local, deployments: set[str]) -> None:
    """Wait until the server has planned runs of these deployments: Prefect 3.8 plans none beside SQLAlchemy 2.1."""
    end = time.monotonic() + SECONDS
    while {run["deployment_id"] for run in local.ask("flow_runs/filter", limit=200)} != deployments:
        assert time.monotonic() < end, (local.state / "server.log").read_text(encoding="utf-8")
        time.sleep(0.2)


def kill(local: Local, program: str) -> None:
    """Kill the server or the worker, and wait until another one runs."""
    (killed,) = [pid for pid, command in local.processes().items() if f"prefect {program} start" in command]
    os.kill(killed, signal.SIGKILL)
    end = time.monotonic() + SECONDS
    while not any(
        f"{program} start" in command for pid, command in local.processes().items() if pid != killed
    ):
        assert local.process.poll() is None, local.output()
        assert time.monotonic() < end, local.output()
        time.sleep(0.2)
    assert f"the {program} ended by itself with status -9: starting it again" in local.output()


@pytest.mark.slow
def test_deployments_build_publish_and_stop_without_a_trace(
    local: Local, tmp_path: Path, model_folder: Path, channel: Channel
) -> None:
    deployments = local.ask("deployments/filter")
    assert len(deployments) == 7
    for deployment in deployments:
        assert deployment["name"] == "default"
        assert deployment["global_concurrency_limit"]["limit"] == 1
        assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
        assert deployment["description"]
        assert "properties" in deployment["parameter_openapi_schema"]

    require_closed(local, deployments[0]["id"])
    active = {each["id"]: each for each in deployments if any(row["active"] for row in each["schedules"])}
    assert [each["entrypoint"] for each in active.values()] == ["pipelines.renewal.rebuild"]
    require_scheduled(local, set(active))

    logged = (local.state / "server.log").read_text(encoding="utf-8")
    kill(local, "server")
    kill(local, "worker")
    local.wait_until_healthy()
    assert (local.state / "server.log").read_text(encoding="utf-8").startswith(logged)

    wrong = json.dumps({"corpus": {"paths": [str(tmp_path)]}})
    local.prefect("deployment", "run", "tokenize-corpus/default", "--params", wrong)
    notice = channel.texts.get(timeout=SECONDS)
    assert "a run failed" in notice
    assert "tokenize-corpus" in notice
    assert "needs a name: --param name=chat" in notice

    parameters = json.dumps(crest_parameters(tmp_path))
    local.prefect("deployment", "run", "build-crest/default", "--params", parameters, "--watch")
    path = released("own")
    manifest = load_manifest(path, "crest")
    assert verify_files(path, manifest) == []
    store = CrestStore.open(path)
    (context,) = load_tokenizer(tmp_path / "tokenizer").encode_documents(["for item in items:"])
    assert len(store.drafter().session(context).propose(16)) > 0
    store.close()
    keys = {artifact["key"] for artifact in local.ask("artifacts/filter")}
    assert "crest-own" in keys
    logs = local.ask("logs/filter", limit=200)
    assert any("finished" in line["message"] for line in logs)

    # What has no schedule is run with what it needs: a model, and its own answers to build from.
    needed: dict[str, Any] = {
        "name": "own",
        "model": str(model_folder),
        "questions": {"prompts": [str(tmp_path / "texts.jsonl")], "limit": 8},
    }
    needed["questions"]["max_new_tokens"] = 12
    local.prefect(
        "deployment", "run", "generate-responses/default", "--params", json.dumps(needed), "--watch"
    )
    answers = {"paths": [str(tmp_path / "home" / "corpora" / "own" / "answers.jsonl.zst")]}
    parameters = json.dumps({"model": str(model_folder), "name": "own", "corpus": answers, "dims": 8})
    local.prefect("deployment", "run", "build-dresd/default", "--params", parameters, "--watch")
    assert load_manifest(released("own-dresd"), "dresd").target_model == "small-model"

    # A run at work when Ctrl-C comes: it ends too, and the catalogue knows.
    slow = {"name": "slow", "corpus": {"paths": [str(write_texts(tmp_path / "more.jsonl", 40_000))]}}
    slow["tokenizer"] = str(tmp_path / "tokenizer")
    local.prefect("deployment", "run", "build-rest/default", "--params", json.dumps(slow))
    until(lambda: "stores/slow/rest" in local.output(), local.output, SECONDS)
    assert local.stop() == 0, local.output()
    assert local.processes() == {}
    logs = local.output() + (local.state / "server.log").read_text(encoding="utf-8")
    assert local.secret.partition(":")[2] not in logs
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", local.port)) != 0
    with connect() as connection:
        states = connection.execute(
            "SELECT state FROM builds WHERE name = 'slow' AND kind = 'rest'"
        ).fetchall()
    assert states in ([("failed",)], [("finished",)])


def test_deployments_name_flows_and_parameters_that_exist() -> None:
    from prefect.flows import load_flow_from_entrypoint

    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    flows = {}
    for deployment in deployments:
        flow: Any = load_flow_from_entrypoint(deployment["entrypoint"])
        given = ON_DEMAND.get(flow.name, {})
        flow.validate_parameters({**deployment.get("parameters", {}), **given})
        flows[flow.name] = deployment
    assert flows.keys() == {
        "tokenize-corpus", "count-ngrams", "build-rest", "build-crest", "rebuild", *ON_DEMAND,
    }  # fmt: skip
    assert flows["build-crest"]["parameters"]["release"] == "{name}"
    assert not flows["build-crest"]["schedules"][0]["active"]  # until a corpus is named
    # One flow does all that is scheduled for a store, step after step; runs of one deployment wait for each other.
    scheduled = [name for name, deployment in flows.items() if "schedules" in deployment]
    assert scheduled == ["build-crest", "rebuild"]
    for deployment in flows.values():
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(main, ["up", "--port", str(port), "--state", str(tmp_path)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.output
    assert "--port" in result.output


class TestRestarts:
    def test_take_longer_each_time_and_end(self) -> None:
        restarts = Restarts(clock=lambda: 0.0)
        assert [restarts.delay() for _ in range(5)] == [1, 2, 4, 8, None]

    def test_go_on_where_a_program_ran_for_long(self) -> None:
        times = itertools.count(step=301)
        restarts = Restarts(clock=lambda: float(next(times)))
        assert [restarts.delay() for _ in range(20)] == [1] + [2] * 19


def test_processes_that_a_killed_make_prefect_left_are_ended(tmp_path: Path) -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    left, other = (
        subprocess.Popen(
            [sys.executable, "-c", code, "-m", "prefect.engine"],
            env={"PREFECT_HOME": str(home)},
            stdout=subprocess.PIPE,
        )
        for home in (tmp_path, tmp_path / "other")
    )
    with left, other:
        for process in (left, other):
            assert process.stdout is not None
            process.stdout.readline()
        end_left_over(tmp_path)
        alive = other.poll() is None
        other.kill()
        left.wait(SECONDS)
    assert alive


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with locked_directory(tmp_path):
        result = CliRunner().invoke(main, ["up", "--port", str(free_port()), "--state", str(tmp_path)])
    assert result.exit_code == 1
    assert "another `make prefect`" in result.output


class TestSecret:
    def test_is_made_once_for_the_owner_alone(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(4) as threads:
            (secret,) = set(threads.map(auth_string, [tmp_path] * 8))
        assert auth_string(tmp_path) == secret
        assert len(secret.partition(":")[2]) == 64
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600

    def test_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        auth_string(tmp_path)
        (tmp_path / AUTH_FILE).chmod(0o644)
        with pytest.raises(SecretError, match="remove the file"):
            auth_string(tmp_path)

    def test_reaches_programs_by_their_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "that:of another server")
        environment = prefect_environment(tmp_path, "http://127.0.0.1:4300/api")
        secret = auth_string(tmp_path)
        assert environment["PREFECT_API_AUTH_STRING"] == secret
        assert environment["PREFECT_SERVER_API_AUTH_STRING"] == secret
        origins = environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"]
        assert origins == "http://127.0.0.1:4300,http://localhost:4300"


def test_programs_of_prefect_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    environment = prefect_environment(tmp_path, "http://127.0.0.1:1/api")
    assert environment.items() >= QUIET.items()
    code = "import pipelines, prefect.settings as s; print(s.PREFECT_SERVER_ANALYTICS_ENABLED.value())"
    bare = {key: value for key, value in os.environ.items() if key not in QUIET}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
