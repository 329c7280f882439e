"""The whole system in its own folder: a collection, `rebuild` on Prefect, lookup service and decoding worker."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

import psutil

from benchmarks.common import CHAT, Workspace, write_records
from benchmarks.measure import progress
from benchmarks.processes import Program, ask, decoding_worker, free_port, lookup_service
from draftstore.text.records import read_json_records
from pipelines.serving import prefect_environment
from schema.db.embedded import HOME_VARIABLE, find_cluster

NAME = "chat"
DOCUMENTS, LONGEST = 300, 4000  # of the collection, and characters of each
EXACT = ("--dtype", "float64")  # passes over several rows then choose what those over one choose
PARAMETERS = {"keep": 10_000, "workers": 1, "distilling": {"max_n": 3, "ngrams": 500, "head": 500}}
UP = "Ctrl-C stops everything"
COMPLETED, FAILED = "completed", "failed"
KINDS = ("little girl", "big dog", "red bird", "small cat", "kind man", "green frog")
PROMPTS = tuple(f"Once upon a time, there was a {kind} named Lily. Lily" for kind in KINDS)


class Event(NamedTuple):
    """A fault, or a flow run; times of the monotonic clock."""

    what: str
    begin: float
    end: float


class Site:
    """The system.

    Attributes:
        programs: the running commands, by name.
        own_disk: whether the stores have their own small file system, which requires root.
        runs: finished flow runs.
        texts: the model's output for each prompt without drafts.
    """

    def __init__(self, space: Workspace) -> None:
        """Start with nothing."""
        self.home, self.model = space.work / "faults-home", space.data / "models" / "stories260K"
        os.environ[HOME_VARIABLE] = str(self.home)
        os.environ.pop("DRAFTSTORE_DATABASE_URL", None)
        self._log, self._state, self._port = space.work / "faults.log", space.work / "prefect", free_port()
        self.socket, self.stores = self.home / "lookup.sock", self.home / "stores"
        self._folder, self.own_disk = space.work / "faults-texts", os.geteuid() == 0
        self._unmount()
        for folder in (self.home, find_cluster(self.home).base, self._state, self._folder):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.stores, self._folder):
            folder.mkdir(parents=True)
        self._log.write_text("")
        if self.own_disk:
            mount = ["mount", "-t", "tmpfs", "-o", "size=256m,mode=755", "faults", str(self.stores)]
            subprocess.run(mount, check=True)
        records = (record for _, record in read_json_records(space.data / "corpora" / CHAT.files[0]))
        messages = (record["messages"][-1]["content"][:LONGEST] for record in records)
        self._pool = list(dict.fromkeys(text for text in itertools.islice(messages, 5000) if text.strip()))
        self.programs: dict[str, Program] = {}
        self.runs: list[Event] = []
        self.texts: dict[str, str] = {}
        self._run: subprocess.Popen[bytes] | None = None
        self._day, self._begin = 0, 0.0

    def start(self) -> None:
        """Start everything: completions without drafts, the collection and its first stores, the services."""
        progress("completions without drafts")
        plain = (*EXACT, "--no-request", "--budget", "0")
        with closing(decoding_worker(self.model, self._log, *plain)) as worker:
            url = worker.wait_until_ready().url
            self.texts = {prompt: complete(url, prompt) for prompt in PROMPTS}
        self.change_texts()
        command("corpus", "add", NAME, self._folder, "--glob", "*.jsonl", "--tokenizer", self.model)
        progress("prefect and the first build")
        prefect = ("pipelines.serving", "--port", self._port, "--state", self._state)
        self.programs["prefect"] = Program("prefect", prefect, self._log)
        self.programs["prefect"].wait_for(lambda: UP in self._log.read_text(errors="replace"))
        self.wait_for_run()
        progress("lookup service and decoding worker")
        served = ("--release", NAME, "--release", f"{NAME}-crest", "--backend", "lmdb")
        lookup = lookup_service(self.socket, self._log, *served)
        self.programs["lookup"] = lookup.wait_until_ready()
        asked = ("--lookup", f"unix:{self.socket}", "--release", NAME, "--wait", "--lookup-deadline", "0.05")
        worker = decoding_worker(self.model, self._log, *EXACT, "--fixed-budget", "--budget", 16, *asked)
        self.programs["worker"] = worker.wait_until_ready()

    def documents(self) -> list[str]:
        """Return today's documents: each day, three are new and two of the oldest are gone."""
        return [*self.texts.values(), *self._pool[2 * self._day : DOCUMENTS + 3 * self._day]]

    def change_texts(self) -> None:
        """Advance to the next day."""
        self._day += 1
        write_records(self._folder / "texts.jsonl", ({"text": text} for text in self.documents()))

    def request_run(self) -> None:
        """Start a flow run and watch it."""
        words = f"{sys.executable} -m prefect deployment run rebuild/default --watch --params".split()
        environment = prefect_environment(self._state, f"http://127.0.0.1:{self._port}/api")
        with self._log.open("ab") as log:
            words.append(json.dumps(PARAMETERS))
            self._run = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        self._begin = time.monotonic()

    def is_running(self) -> bool:
        """Return True while a flow run is watched; note its end."""
        if self._run is not None and self._run.poll() is not None:
            what = FAILED if self._run.returncode else COMPLETED
            self.runs.append(Event(what, self._begin, time.monotonic()))
            progress(f"a run has {what}")
            self._run = None
        return self._run is not None

    def wait_for_run(self) -> None:
        """Wait until no flow run is watched, then for another one."""
        for number in range(2):
            if number:
                self.request_run()
            while self.is_running():
                self.revive()
                time.sleep(0.25)

    def revive(self) -> None:
        """Restart programs that have ended."""
        for program in self.programs.values():
            program.revive()

    def family(self, name: str) -> list[psutil.Process]:
        """Return the processes of a program, or of the database."""
        if name != "database":
            return self.programs[name].family()
        pid = find_cluster(self.home).state().pid
        return [psutil.Process(pid)] if pid else []

    def close(self) -> None:
        """Stop everything."""
        for program in reversed(self.programs.values()):
            program.close()
        subprocess.run([sys.executable, "-m", "draftstore", "db", "stop"], check=False, capture_output=True)
        self._unmount()

    def _unmount(self) -> None:
        if self.stores.is_mount():
            subprocess.run(["umount", "--lazy", str(self.stores)], check=True)


def command(*arguments: object) -> Any:
    """Run a draftstore command with `--json` and return its document, whatever its exit status."""
    words = [sys.executable, "-m", "draftstore", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True).stdout)


def complete(url: str, prompt: str) -> str:
    """Return a greedy completion of a decoding worker, or raise one of `NO_ANSWER`."""
    body = {"prompt": prompt, "max_tokens": 48, "temperature": 0.0}
    status, found = ask(f"{url}/v1/completions", body)
    if status != 200:
        raise ConnectionError(f"status {status}")
    return str(found["choices"][0]["text"])
