"""The whole system in a folder of its own: a collection, `rebuild` on Prefect, lookup service and decoding worker."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.common import CHAT, Workspace, write_records
from benchmarks.measure import progress
from benchmarks.processes import NO_ANSWER, Program, ask, decoding_worker, free_port, lookup_service
from draftstore.text.records import read_json_records
from pipelines.secret import AUTH_FILE
from schema.home import HOME_VARIABLE
from schema.postgres.placement import find_place
from schema.postgres.state import server_state

NAME = "chat"
DOCUMENTS, LONGEST = 300, 4000
"""Documents of the collection, and maximum characters of each."""
EXACT = ("--dtype", "float64")
"""Passes over several rows then choose what passes over one choose."""
PARAMETERS = {"workers": 1, "distilling": {"max_n": 3, "ngrams": 500, "head": 500}}
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STUCK_SECONDS = 600.0
TOKENS = 48
PROMPTS = tuple(
    f"Once upon a time, there was a {kind} named {name}. {name}"
    for kind in ("little girl", "big dog", "red bird")
    for name in ("Lily", "Tom", "Max", "Sue")
)


class Run(NamedTuple):
    """A flow run that has ended; times of the monotonic clock."""

    state: str
    message: str
    begin: float
    end: float


class Site:
    """The system, started part by part.

    Attributes:
        disk: folder of the small file system of the stores; None: there is none.
        runs: flow runs that have ended.
        texts: what the model says to each prompt without drafts.
        programs: the commands that run, by name.
    """

    def __init__(self, space: Workspace, disk_mb: int) -> None:
        """Start from nothing.

        Args:
            space: where all of it lies.
            disk_mb: megabytes of a file system of their own for the stores, which takes root; 0: none.
        """
        self.work, self.home = space.work, space.work / "faults-home"
        self.model = space.data / "models" / "stories260K"
        os.environ[HOME_VARIABLE] = str(self.home)
        os.environ.pop("DRAFTSTORE_DATABASE_URL", None)
        self._log, self._state, self._port = space.work / "faults.log", space.work / "prefect", free_port()
        self.socket = self.home / "lookup.sock"
        stores, self._folder = self.home / "stores", space.work / "faults-texts"
        unmount(stores)
        for folder in (self.home, find_place(self.home).base, self._state, self._folder):
            shutil.rmtree(folder, ignore_errors=True)
        stores.mkdir(parents=True)
        self._folder.mkdir()
        self.disk: Path | None = None
        if disk_mb:
            options = f"size={disk_mb}m,mode=755"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "faults", str(stores)], check=True)
            self.disk = stores
        records = (record for _, record in read_json_records(space.data / "corpora" / CHAT.files[0]))
        messages = (record["messages"][-1]["content"][:LONGEST] for record in records)
        self._pool = list(dict.fromkeys(text for text in itertools.islice(messages, 5000) if text.strip()))
        self.programs: dict[str, Program] = {}
        self.runs: list[Run] = []
        self.texts: dict[str, str] = {}
        self._day, self._run, self._begin = 0, "", 0.0

    def start(self) -> None:
        """Start everything: completions without drafts, the collection and its first stores, the services."""
        progress("completions without drafts")
        plain = (*EXACT, "--no-request", "--budget", "0")
        with decoding_worker(self.model, self._log, *plain) as worker:
            url = worker.wait_until_ready().url
            self.texts = {prompt: complete(url, prompt) for prompt in PROMPTS}
        self.change_texts()
        command("corpus", "add", NAME, self._folder, "--glob", "*.jsonl", "--tokenizer", self.model)
        progress("prefect and the first build")
        prefect = ("pipelines.local", "up", "--port", self._port, "--state", self._state)
        self.programs["prefect"] = Program("prefect", prefect, self._log)
        while (run := self.look()) is None or run.state != "COMPLETED":
            if run is not None:
                raise SystemExit(f"the first run: {run}")
            self.request_run()
            time.sleep(0.5)
        progress("lookup service and decoding worker")
        served = ("--release", NAME, "--release", f"{NAME}-crest", "--backend", "lmdb", "--workers", 2)
        lookup = lookup_service(self.socket, self._log, *served)
        self.programs["lookup"] = lookup.wait_until_ready()
        asked = ("--lookup", f"unix:{self.socket}", "--release", NAME, "--wait", "--lookup-deadline", "0.05")
        worker = decoding_worker(self.model, self._log, *EXACT, "--fixed-budget", "--budget", 16, *asked)
        self.programs["worker"] = worker.wait_until_ready()

    def documents(self) -> list[str]:
        """Return the documents of today: each day three are new, and two of the oldest are gone."""
        return [*self.texts.values(), *self._pool[2 * self._day : DOCUMENTS + 3 * self._day]]

    def change_texts(self) -> None:
        """Go on to the next day."""
        self._day += 1
        write_records(self._folder / "texts.jsonl", ({"text": text} for text in self.documents()))

    def request_run(self) -> None:
        """Have a flow run start, unless one is under way or Prefect does not answer."""
        if not self._run:
            try:
                deployment = self._ask("deployments/name/rebuild/default")["id"]
                made = self._ask(f"deployments/{deployment}/create_flow_run", {"parameters": PARAMETERS})
                self._run, self._begin = made["id"], time.monotonic()
            except (*NO_ANSWER, LookupError, TypeError):
                return

    @property
    def idle(self) -> bool:
        """Whether no flow run is under way."""
        return not self._run

    def look(self) -> Run | None:
        """Return the flow run that was under way, if it has ended."""
        if not self._run:
            return None
        now = time.monotonic()
        try:
            found = self._ask(f"flow_runs/{self._run}")
            state, message = found["state_type"], found["state"]["message"] or ""
        except (*NO_ANSWER, LookupError, TypeError):
            return None
        if state not in ENDS and now - self._begin < STUCK_SECONDS:
            return None
        self._run = ""
        self.runs.append(Run(state, " ".join(message.split())[:200], self._begin, now))
        return self.runs[-1]

    def _ask(self, path: str, body: object = None) -> Any:
        """Send a request to Prefect's API."""
        secret = (self._state / AUTH_FILE).read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
        url = f"http://127.0.0.1:{self._port}/api/{path}"
        status, found = ask(url, body, seconds=5.0, headers=headers)
        if status not in (200, 201):
            raise ConnectionError(f"{path}: {status}")
        return found

    def revive(self) -> None:
        """Start again what has ended as a whole."""
        for program in self.programs.values():
            program.revive()

    def family(self, name: str) -> list[psutil.Process]:
        """Return the processes of a program, or of the database."""
        if name != "database":
            return self.programs[name].family()
        state = server_state(find_place(self.home).base)
        pids = [pid for pid in (state.supervisor, state.server) if pid and psutil.pid_exists(pid)]
        return [psutil.Process(pid) for pid in pids]

    def close(self) -> None:
        """Stop all of it."""
        for name in ("worker", "lookup", "prefect"):
            if name in self.programs:
                self.programs[name].stop()
        subprocess.run([sys.executable, "-m", "draftstore", "db", "stop"], check=False, capture_output=True)
        if self.disk:
            unmount(self.disk)


def command(*arguments: object) -> Any:
    """Run a command of draftstore with `--json`, and return its document, whatever its exit status is."""
    words = [sys.executable, "-m", "draftstore", *map(str, arguments), "--json"]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def complete(url: str, prompt: str) -> str:
    """Return a greedy completion of a decoding worker.

    Raises:
        OSError: it does not answer, or refuses.
        http.client.HTTPException: the answer breaks off.
    """
    asked: Mapping[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    status, found = ask(f"{url}/v1/completions", asked)
    if status != 200:
        raise ConnectionError(f"status {status}")
    text: str = found["choices"][0]["text"]
    return text


def unmount(folder: Path) -> None:
    """Take a file system away, if there is one."""
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
