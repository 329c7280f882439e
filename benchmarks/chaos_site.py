"""The whole system of a soak in a folder of its own: catalogue, flows, lookup service and decoding worker."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.chaos_clients import complete
from benchmarks.chaos_flows import Flows
from benchmarks.common import CHAT, SEED, Workspace, write_records
from benchmarks.keeping import Kept, decoding_worker, is_ready
from benchmarks.measure import progress
from benchmarks.service import Service, anonymous_bytes, free_port
from draftstore.storage.report import ReadReport
from draftstore.text.corpus import read_corpus
from draftstore.text.tokenizer import load_tokenizer
from schema.database import connect
from schema.home import HOME_VARIABLE, data_home
from schema.postgres.placement import find_place
from schema.postgres.state import server_state

RELEASE = "chaos"
EPOCH = {"SOURCE_DATE_EPOCH": "1700000000"}
"""Makes a build the same bytes each time, manifest included: what was pruned and is built again answers as before."""
EXACT = ("--dtype", "float64")
"""So that passes over several rows choose what passes over one choose."""
LONGEST_TEXT = 4000
"""Characters of a document."""
WIDTH = 16
COMMAND = (sys.executable, "-m", "draftstore")
PROMPTS = tuple(
    f"Once upon a time, there was a {kind} named {name}. {name}"
    for kind in ("little girl", "big dog", "red bird")
    for name in ("Lily", "Tom", "Max", "Sue")
)


class Site:
    """The system, started part by part.

    Attributes:
        flows: Prefect.
        lookup: the service, once it is started.
        worker: the decoding worker, once it is started.
    """

    def __init__(self, workspace: Workspace, disk_mb: int) -> None:
        """Make an empty data folder, whose stores lie on a small file system, and start Prefect.

        Args:
            workspace: where all of it lies.
            disk_mb: megabytes of that file system, which takes root; 0: stores lie on the disk.
        """
        self.work, self.model = workspace.work, workspace.data / "models" / "stories260K"
        self._workspace = workspace
        self.home = data_home()
        self.disk: Path | None = None
        self._make_home(disk_mb)
        self.flows = Flows(self.work, "build-crest/default", EPOCH)
        self.lookup: Kept | None = None
        self.worker: Kept | None = None
        self.socket = self.home / "lookup.sock"
        self.http, self._port = free_port(), free_port()
        self.corpora: list[Path] = []

    @property
    def urls(self) -> dict[str, str]:
        """HTTP addresses of lookup service and decoding worker."""
        return {"lookup": f"http://127.0.0.1:{self.http}", "worker": f"http://127.0.0.1:{self._port}"}

    def _make_home(self, disk_mb: int) -> None:
        """Start from nothing."""
        stores = self.home / "stores"
        unmount(stores)
        for folder in (self.home, find_place(self.home).base, self.work / "prefect"):
            shutil.rmtree(folder, ignore_errors=True)
        stores.mkdir(parents=True)
        if disk_mb:
            options = f"size={disk_mb}m,mode=755"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", str(stores)], check=True)
            self.disk = stores

    def reference(self) -> dict[str, str]:
        """Return what the model says to each prompt without drafts."""
        options = (*EXACT, "--no-request", "--budget", "0")
        with decoding_worker(self.model, self._port, self.work / "chaos-worker.log", *options) as worker:
            worker.wait_for(lambda: is_ready(self.urls["worker"]))
            return {prompt: complete(self.urls["worker"], prompt)[1] for prompt in PROMPTS}

    def write_corpora(self, count: int, documents: int, texts: Mapping[str, str]) -> None:
        """Write corpora that are alike, each with the model's answers, so that drafts from them are right at times."""
        render = partial(self._workspace.tokenizer.render_chat, add_generation_prompt=False)
        files = self._workspace.inputs(CHAT)
        read = list(islice(read_corpus(files, render=render, report=ReadReport()), documents + count))
        answers = [{"text": prompt + text} for prompt, text in texts.items()]
        for number in range(count):
            chosen = [{"text": each.text[:LONGEST_TEXT]} for each in read[number : number + documents]]
            self.corpora.append(self.work / "corpora" / f"chaos-{number}.jsonl")
            write_records(self.corpora[-1], [*answers, *chosen])

    def parameters(self, corpus: Path, keep: int = 1) -> dict[str, Any]:
        """Return the parameters of a flow run that builds from a corpus, publishes, and prunes."""
        return {
            "name": RELEASE, "release": RELEASE, "keep": keep, "corpus": {"paths": [str(corpus)]},
            "tokenizer": str(self.model), "max_n": 3, "ngrams": 3000, "head": 1000, "workers": 1,
            "backends": ["lmdb", "postgres"],
        }  # fmt: skip

    def build_all(self) -> list[Path]:
        """Build the store of each corpus once, and return them.

        Raises:
            SystemExit: a run failed.
        """
        stores = []
        for corpus in self.corpora:
            run = self.flows.run(self.parameters(corpus, keep=2 * len(self.corpora)))
            if run.state != "COMPLETED":
                raise SystemExit(f"a flow ended as {run.state}: {run.message}")
            progress(f"{corpus.name}: built in {run.end - run.begin:.0f} s")
            stores.append(live())
        return stores

    def contexts(self, count: int) -> NDArray[np.int32]:
        """Return int32 [count, 16]: pieces of the first corpus."""
        tokenizer = load_tokenizer(self.model)
        texts = [json.loads(line)["text"] for line in self.corpora[0].read_text().splitlines()]
        tokens = np.concatenate([tokenizer.encode(text, bos=False) for text in texts[:50]]).astype(np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(tokens, WIDTH)
        drawn: NDArray[np.int32] = windows[
            np.random.default_rng(SEED).integers(0, len(windows), count)
        ].copy()
        return drawn

    def serve(self) -> None:
        """Start the lookup service and a decoding worker that asks it, and wait until both are ready."""
        arguments = (
            "draftstore", "serve", "--release", RELEASE, "--backend", "lmdb", "--socket", self.socket,
            "--http", f"127.0.0.1:{self.http}", "--workers", 2,
        )  # fmt: skip
        self.lookup = Kept("lookup service", arguments, self.work / "chaos-lookup.log")
        self.lookup.wait_for(lambda: is_ready(self.urls["lookup"]))
        options = (*EXACT, "--fixed-budget", "--budget", "16", "--release", RELEASE, "--wait")
        asked = ("--lookup", f"unix:{self.socket}")
        log = self.work / "chaos-worker.log"
        self.worker = decoding_worker(self.model, self._port, log, *options, *asked)
        self.worker.wait_for(lambda: is_ready(self.urls["worker"]))

    @property
    def kept(self) -> Sequence[Kept]:
        """All commands that run, those that others need last."""
        return [each for each in (self.worker, self.lookup, self.flows.kept) if each]

    def roles(self) -> dict[int, str]:
        """Return the roles of all processes by process id."""
        found = self.flows.processes()
        if self.lookup:
            found |= lookup_roles(Service(str(self.socket), self.lookup.process, self.http))
        if self.worker:
            found[self.worker.process.pid] = "decoding worker"
        return found | database_roles(self.home)

    def memory(self) -> dict[str, int]:
        """Return the resident anonymous bytes of each role, the most of any of its processes."""
        sizes: dict[str, int] = {}
        for pid, role in self.roles().items():
            sizes[role] = max(sizes.get(role, 0), anonymous_bytes(pid))
        return sizes

    def close(self) -> None:
        """Stop all of it."""
        for each in self.kept:
            each.stop()
        subprocess.run([*COMMAND, "db", "stop"], check=False, stdout=subprocess.DEVNULL)
        if self.disk:
            unmount(self.disk)


def lookup_roles(service: Service) -> dict[int, str]:
    """Return the roles of a lookup service's processes by process id."""
    found = {pid: f"lookup {role}" for pid, role in service.processes().items()}
    others = [pid for pid, role in found.items() if role == "lookup other"]
    if len(others) == 1:  # else one is a worker that has no store open yet
        found[others[0]] = "lookup web"
    return found


def database_roles(home: Path) -> dict[int, str]:
    """Return the roles of the embedded PostgreSQL's processes by process id."""
    state = server_state(find_place(home).base)
    roles = ((state.server, "postgres"), (state.supervisor, "database supervisor"))
    return {pid: role for pid, role in roles if pid}


def live() -> Path:
    """Return the store that the release points at."""
    query = "SELECT path FROM releases JOIN builds ON builds.id = build_id WHERE releases.name = %s"
    with connect() as connection:
        ((path,),) = connection.execute(query, [RELEASE]).fetchall()
    return Path(path)


def unmount(folder: Path) -> None:
    """Take a file system away, if there is one."""
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def use_home(work: Path) -> None:
    """Have this process and all that it starts work with a data folder of the soak's own."""
    os.environ[HOME_VARIABLE] = str((work / "chaos-home").resolve())
    os.environ.pop("DRAFTSTORE_DATABASE_URL", None)
