"""`python -m pipelines.serving`, as `make prefect` starts it: a real Prefect server, the deployments and their runs."""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from draftstore.errors import DraftstoreError
from draftstore.options import OptionsError
from draftstore.storage.files import locked_directory
from draftstore.storage.manifest import load_manifest, verify_files
from pipelines.serving import AUTH_FILE, auth_string, main, prefect_environment
from schema.db.database import connect
from schema.db.embedded import HOME_VARIABLE
from tests import ROOT
from tests.conftest import small_tokenizer_folder, write_texts
from tests.fakes.servers import free_port
from tests.fakes.waiting import until

SECONDS = 300.0


class Local:
    """`python -m pipelines.serving` in a process of its own, which may be started again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.state = folder / "prefect"
        self._log = folder / "serving.log"
        self.start()

    def start(self) -> None:
        """Start it, and wait until runs can start."""
        self.launch()
        ended = self.process.poll
        until(lambda: "Ctrl-C stops everything" in self.output() or ended() is not None, self.output, SECONDS)
        assert ended() is None, self.output()

    def launch(self) -> None:
        """Start it."""
        words = [sys.executable, "-m", "pipelines.serving"]
        words += ["--port", str(self.port), "--state", str(self.state)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def secret(self) -> str:
        return (self.state / AUTH_FILE).read_text(encoding="utf-8").strip()

    @property
    def auth(self) -> tuple[str, ...]:
        return tuple(self.secret.split(":"))

    def send(
        self, path: str, body: Any = None, method: str = "POST", auth: Any = None, **headers: str
    ) -> httpx.Response:
        """Send the server's API a request, with the password only if `auth` says it."""
        url = f"{self.url}/{path}"
        return httpx.request(
            method, url, json=body or {}, auth=auth, headers=headers, timeout=60, trust_env=False
        )

    def ask(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Ask the server's API, again while its database is busy, as clients of Prefect do."""
        while (answer := self.send(path, body, method, auth=self.auth)).status_code == 503:
            pass
        return answer.raise_for_status().json() if answer.content else None

    def deployments(self) -> dict[str, Any]:
        """Return the deployments by the names of their flows."""
        flows = {flow["id"]: flow["name"] for flow in self.ask("flows/filter")}
        found = self.ask("deployments/filter")
        assert {each["name"] for each in found} == {"default"}
        return {flows[each["flow_id"]]: each for each in found}

    def run(self, flow: str, **parameters: Any) -> str:
        """Have a run start; return its id."""
        deployment = self.deployments()[flow]["id"]
        return str(self.ask(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

    def state_of(self, run: str) -> dict[str, Any]:
        [found] = self.ask("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return dict(found["state"])

    def wait_for(self, run: str, name: str) -> dict[str, Any]:
        """Wait until a run has a state; return it."""
        until(lambda: self.state_of(run)["name"] == name, self.output, SECONDS)
        return self.state_of(run)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send it a signal; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def processes(self) -> list[str]:
        """Return the command lines of processes that it or its server started."""
        mark, found = f"PREFECT_API_URL={self.url}".encode(), []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdecimal() and mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        return found


@contextmanager
def serving(answer: Callable[[Any], None]) -> Iterator[str]:
    """Serve HTTP requests, each with a call of a function; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[str]]:
    """Return the texts that the webhook of a chat gets."""
    texts: queue.Queue[str] = queue.Queue()

    def answer(request: Any) -> None:
        texts.put(json.loads(request.rfile.read(int(request.headers["Content-Length"])))["text"])
        request.send_response(204)
        request.end_headers()

    with serving(answer) as address:
        monkeypatch.setenv("DRAFTSTORE_NOTIFY_URL", f"{address}/hook")
        yield texts


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str, notices: queue.Queue[str]
) -> Iterator[Local]:
    """Start everything, with a data folder and a database of the test's own."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    found = Local(tmp_path)
    try:
        yield found
    finally:
        found.stop(signal.SIGTERM)


def rows(query: str) -> list[tuple[Any, ...]]:
    """Ask the catalogue."""
    with connect() as connection:
        return connection.execute(query.encode()).fetchall()


def test_only_those_with_the_password_have_flows_run(local: Local) -> None:
    from pipelines.flows import FLOWS

    secret, deployments = local.secret, local.deployments()
    assert deployments.keys() == {"rebuild", *(flow.name for flow in FLOWS)}
    # Only what somebody named is built on schedule.
    assert [flow for flow, each in deployments.items() if each["schedules"]] == ["rebuild"]
    for deployment in deployments.values():
        assert deployment["global_concurrency_limit"]["limit"] == 1
        assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    start = f"deployments/{deployments['tokenize-corpus']['id']}/create_flow_run"
    assert local.send("deployments/filter").status_code == 401
    assert local.send(start, Origin="https://evil.example").status_code == 401
    assert local.send(start, auth=("draftstore", "wrong")).status_code == 401
    own = f"http://localhost:{local.port}"
    for origin, allowed in (("https://evil.example", None), (own, own)):
        answer = local.send("deployments/filter", auth=local.auth, Origin=origin)
        assert answer.headers.get("Access-Control-Allow-Origin") == allowed
    unknown = local.send(start, {"parameters": {"nme": "own"}}, auth=local.auth)
    assert (unknown.status_code, "'nme' was unexpected" in unknown.json()["detail"]) == (409, True)
    page = local.send("../ui-settings", method="GET")
    assert page.json()["auth"] == "BASIC"  # the page asks for the password
    assert not any(secret in command for command in local.processes())

    assert local.stop() == 0, local.output()
    until(lambda: local.processes() == [], local.processes)
    logs = local.output() + (local.state / "server.log").read_text(encoding="utf-8")
    assert secret.partition(":")[2] not in logs


@pytest.mark.slow
def test_deployments_build_publish_and_run_nothing_else(
    local: Local, tmp_path: Path, notices: queue.Queue[str]
) -> None:
    parameters = {
        "name": "own",
        "corpus": {"paths": [str(write_texts(tmp_path / "texts.jsonl", 60))]},
        "tokenizer": str(small_tokenizer_folder(tmp_path / "tokenizer")),
        "ngrams": 300,
    }

    def watched(given: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        words = ["deployment", "run", "build-crest/default", "--watch", "--params", json.dumps(given)]
        return subprocess.run(
            [sys.executable, "-m", "prefect", *words],
            env=os.environ | prefect_environment(local.state, local.url),
            capture_output=True,
            text=True,
            check=False,
        )

    ran = watched(parameters)
    assert ran.returncode == 0, ran.stdout + ran.stderr + local.output()
    reason = "a store of your own texts needs a name: --param name=chat"
    refused = watched({"corpus": parameters["corpus"]})
    assert refused.returncode == 1
    assert reason in " ".join(refused.stdout.split())
    assert reason in notices.get(timeout=SECONDS)
    query = "SELECT path FROM releases JOIN builds ON builds.id = build_id WHERE releases.name = 'own'"
    ((path,),) = rows(query)
    assert verify_files(Path(path), load_manifest(Path(path), "crest")) == []
    assert any("finished" in line["message"] for line in local.ask("logs/filter", {"limit": 200}))

    # Whatever else of a run the server was told, its flow runs. It is refused, and says why.
    deployment = local.deployments()["tokenize-corpus"]["id"]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    evil = {"script": f"touch {tmp_path / 'pwned'}"}
    changes = {
        "entrypoint": f"{tmp_path}/evil.py:tokenize_corpus",
        "path": str(tmp_path),
        "pull_steps": [{"prefect.deployments.steps.run_shell_script": evil}],
    }
    local.ask(f"deployments/{deployment}", changes, "PATCH")
    variables = {"command": f"touch {tmp_path / 'pwned'}", "env": {"PYTHONPATH": str(tmp_path)}}
    asked = {"parameters": {"corpus": {"paths": [str(tmp_path)]}}, "job_variables": variables}
    run = local.ask(f"deployments/{deployment}/create_flow_run", asked)["id"]
    assert local.wait_for(run, "Failed")["message"].startswith(reason)
    assert reason in local.output()
    notice = notices.get(timeout=SECONDS)
    assert all(words in notice for words in ("a run failed", "tokenize-corpus", reason))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.slow
def test_runs_that_are_cut_off_are_marked_and_resume(
    local: Local, tmp_path: Path, notices: queue.Queue[str]
) -> None:
    tokenizer = str(small_tokenizer_folder(tmp_path / "tokenizer"))
    quick = {"name": "own", "corpus": {"paths": [str(write_texts(tmp_path / "texts.jsonl", 60))]}}
    slow = {"name": "slow", "corpus": {"paths": [str(write_texts(tmp_path / "more.jsonl", 60_000))]}}
    quick["tokenizer"] = slow["tokenizer"] = tokenizer
    deployment = local.deployments()["tokenize-corpus"]["id"]
    scheduled = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"tags": {"all_": ["auto-scheduled"]}},
    }

    def runs() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = local.ask("flow_runs/filter", scheduled)
        return found

    def begin() -> str:
        run = local.run("build-rest", **slow)
        until(lambda: "stores/slow" in local.output(), local.output, SECONDS)
        return run

    # A schedule due in the next seconds.
    schedule = {"schedule": {"interval": 20}, "parameters": quick, "active": True}
    local.ask(f"deployments/{deployment}/schedules", [schedule])
    until(lambda: any(run["state_name"] == "Completed" for run in runs()), local.output, SECONDS)

    run = begin()
    assert local.stop(signal.SIGTERM) == 0, local.output()
    until(lambda: local.processes() == [], local.processes)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", local.port)) != 0
    assert {state for (state,) in rows("SELECT state FROM builds WHERE name = 'slow'")} == {"failed"}
    now = datetime.now(UTC)
    local.start()
    assert local.state_of(run)["name"] == "Cancelled"
    due = [run["expected_start_time"] for run in runs() if run["state_name"] in ("Scheduled", "Late")]
    assert all(datetime.fromisoformat(begin) > now for begin in due)  # those that were missed are gone
    local.ask(f"deployments/{deployment}/schedules", [schedule])  # its start has set those of the program
    done = sum(run["state_name"] == "Completed" for run in runs())
    until(lambda: sum(run["state_name"] == "Completed" for run in runs()) > done, local.output, SECONDS)

    run = begin()
    local.stop(signal.SIGKILL)
    until(lambda: local.processes() == [], local.processes)
    local.start()
    state = local.state_of(run)
    assert (state["name"], state["message"].partition(":")[0]) == ("Crashed", "this run was cut off")
    while "this run was cut off" not in notices.get(timeout=SECONDS):
        pass  # notices of runs that had just begun when it was stopped
    local.wait_for(local.run("build-rest", **slow), "Completed")
    states = rows("SELECT state FROM builds WHERE name = 'slow' ORDER BY id")
    assert states[0] == ("failed",)
    assert states[-1] == ("finished",)
    assert ("running",) not in states


@pytest.mark.slow
def test_a_start_applies_the_file_and_logs_resets(local: Local, tmp_path: Path) -> None:
    file = tmp_path / "home" / "flows.toml"

    def held(flow: str) -> tuple[list[tuple[Any, ...]], dict[str, Any], bool]:
        found = local.deployments()[flow]
        schedules = [
            (*(each["schedule"][key] for key in ("cron", "timezone")), each["active"])
            for each in found["schedules"]
        ]
        return schedules, found["parameters"], found["paused"]

    def resets() -> list[str]:
        return sorted(line for line in local.output().splitlines() if "reset" in line or "paused" in line)

    assert held("rebuild") == ([("45 2 * * *", "UTC", True)], {"keep": 3}, False)
    assert resets() == []
    # What the file says holds from the next start on; of what the page changed, only a pause.
    file.parent.mkdir(exist_ok=True)
    file.write_text(
        """
        [rebuild]
        schedule = "30 4 * * *"
        timezone = "Europe/Berlin"
        parameters = {distilling = false}

        [build-crest]
        schedule = "15 2 * * *"
        parameters = {name = "chat", corpus = {paths = ["/data/chats"]}}
        """
    )
    rebuild = [("30 4 * * *", "Europe/Berlin", True)], {"keep": 3, "distilling": None}, False
    corpus = {"paths": ["/data/chats"]}
    crest = (
        [("15 2 * * *", "UTC", True)],
        {"name": "chat", "corpus": corpus, "release": "{name}", "keep": 7},
        False,
    )
    nothing: tuple[Any, ...] = [], {}, False
    for flow, changes in (("rebuild", {"parameters": {"keep": 9}}), ("tokenize-corpus", {"paused": True})):
        local.ask(f"deployments/{local.deployments()[flow]['id']}", changes, "PATCH")
    own = {"schedule": {"cron": "0 5 * * *", "timezone": "UTC"}, "active": True, "slug": "own"}
    local.ask(f"deployments/{local.deployments()['count-ngrams']['id']}/schedules", [own])
    assert local.stop(signal.SIGTERM) == 0, local.output()
    local.start()
    assert [held(flow) for flow in ("rebuild", "build-crest", "count-ngrams")] == [rebuild, crest, nothing]
    assert held("tokenize-corpus") == ([], {}, True)
    pause = "tokenize-corpus: paused in Prefect, and stays so"
    assert resets() == [
        'build-crest: parameter corpus reset to {"paths": ["/data/chats"]}, from its default',
        'build-crest: parameter name reset to "chat", from its default',
        "build-crest: schedule reset to cron 15 2 * * *, timezone UTC, from none",
        "count-ngrams: schedule reset to none, from cron 0 5 * * *, timezone UTC, slug own",
        "rebuild: parameter distilling reset to null, from its default",
        "rebuild: parameter keep reset to 3, from 9",
        "rebuild: schedule reset to cron 30 4 * * *, timezone Europe/Berlin, from cron 45 2 * * *, timezone UTC",
        pause,
    ]  # fmt: skip

    # A file with an error changes nothing.
    assert local.stop(signal.SIGTERM) == 0, local.output()
    file.write_text("[rebuild]\nparameters = {keep = 1}\n[build-rest.parameters]\nnme = 'chat'\n")
    local.launch()
    assert local.process.wait(SECONDS) == 1
    assert f"Error: {file}: build-rest.parameters.nme: unknown field\n" in local.output()


class TestSettings:
    @pytest.fixture
    def read(self, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
        from pipelines.deployments import DEPLOYED, read_settings

        def read(text: str) -> dict[str, Any]:
            file = tmp_path / "flows.toml"
            file.write_text(text)
            return read_settings(file, DEPLOYED)

        return read

    def test_are_the_defaults_with_the_file_over_them(self, read: Callable[[str], dict[str, Any]]) -> None:
        defaults = read("")
        assert defaults["rebuild"].schedule == "45 2 * * *"
        text = "rebuild.schedule = false\nbuild-crest.parameters = {keep = false, max_bytes = '10MB'}"
        settings = read(text)
        assert settings["rebuild"] == defaults["rebuild"].changed(schedule=None)
        own = {
            "keep": None,
            "max_bytes": 10_000_000,
            "release": "{name}",
        }  # as its flow's JSON schema wants it
        assert settings["build-crest"].parameters == own
        assert settings["build-dresd"] == defaults["build-dresd"]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("[rebuild", "Expected ']'"),
            ("[rebuilt]", "rebuilt: is not"),
            ("rebuild = 3", "rebuild: is not"),
            ("rebuild.shedule = '45 2 * * *'", "rebuild.shedule: unknown field"),
            ("rebuild.schedule = '61 * * * *'", "rebuild.schedule: Invalid cron"),
            ("rebuild.timezone = 'CEST'", "rebuild.timezone: invalid timezone"),
            ("rebuild.parameters = 3", "rebuild.parameters: must be"),
            ("rebuild.parameters.keep = 0", "rebuild.parameters.keep: must be"),
            ("rebuild.parameters.nme = 1", "rebuild.parameters.nme: unknown field"),
            ("build-dresd.schedule = '45 2 * * *'", "build-dresd.parameters.model: Field required"),
        ],
    )
    def test_an_error_names_file_and_key(
        self, read: Callable[[str], dict[str, Any]], text: str, reason: str
    ) -> None:
        with pytest.raises(OptionsError, match=re.escape(f"flows.toml: {reason}")):
            read(text)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/api", "127.0.0.1:{port}/api"])
def test_a_server_that_does_not_answer_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.serving.FIND_SECONDS", 0.1)
    url = url.format(port=free_port())
    result = CliRunner().invoke(main, env={"PREFECT_API_URL": url})
    assert result.exit_code == 1
    assert re.match(
        f"looking for .+{url} ...\nError: no Prefect server answers at {url}: without PREFECT_API_URL, one is",
        result.output,
    )


def test_a_webhook_that_cannot_be_used_is_a_sentence_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipelines.deployments import notify

    asked: list[str] = []

    def answer(request: Any) -> None:
        asked.append(request.path)
        if request.path == "/odd":
            request.wfile.write(b"\0\1\2\r\n\r\n")
            return
        request.send_response(302)
        request.send_header("Location", "/inside")
        request.end_headers()

    names: Any = SimpleNamespace(name="own", message="why")
    with serving(answer) as here:
        wrong = "hooks.example/x", f"{here}/a\nb", "http://[::1", "file:///etc/hostname"
        for url in (*wrong, f"{here}/odd", f"{here}/moved"):
            monkeypatch.setenv("DRAFTSTORE_NOTIFY_URL", url)
            notify(names, names, names)
            assert "the webhook of DRAFTSTORE_NOTIFY_URL failed: " in capsys.readouterr().err
    assert asked == ["/odd", "/moved"]


def test_a_port_or_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    def refusal(port: int) -> str:
        result = CliRunner().invoke(main, ["--port", str(port), "--state", str(tmp_path)])
        assert result.exit_code == 1
        return result.output

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refusal(port)
    with locked_directory(tmp_path):
        assert "another `make prefect`" in refusal(free_port())


class TestSecret:
    def test_is_created_once_and_readable_only_by_its_owner(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(4) as threads:
            (secret,) = set(threads.map(auth_string, [tmp_path] * 8))
        assert auth_string(tmp_path) == secret
        assert len(secret.partition(":")[2]) == 64
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        with pytest.raises(DraftstoreError, match="remove the file"):
            auth_string(tmp_path)

    def test_reaches_programs_by_their_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "that:of another server")
        environment = prefect_environment(tmp_path, "http://127.0.0.1:4300/api")
        secret = auth_string(tmp_path)
        assert environment["PREFECT_API_AUTH_STRING"] == secret
        assert environment["PREFECT_SERVER_API_AUTH_STRING"] == secret


def test_prefect_is_silent() -> None:
    code = "import pipelines, prefect.settings as s; print(s.PREFECT_SERVER_ANALYTICS_ENABLED.value())"
    bare = {key: value for key, value in os.environ.items() if "TRACK" not in key and "ANALYTICS" not in key}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "False"
