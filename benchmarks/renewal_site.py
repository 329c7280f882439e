"""A site whose stores renew themselves: a collection, `rebuild` on a schedule, a lookup service, and a client of it."""

import dataclasses
import itertools
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import NullPool
from sqlalchemy.orm import sessionmaker

from benchmarks.chaos_flows import Flows
from benchmarks.chaos_site import COMMAND, database_roles, lookup_roles
from benchmarks.common import TOKENIZER, Workspace
from benchmarks.keeping import TROUBLE, Kept
from benchmarks.service import Service, ask_status, free_port
from draftstore.remote.breaker import Breaker
from draftstore.remote.client import RemoteStore
from draftstore.storage.streams import read_lines
from draftstore.stores.registry import open_store
from draftstore.trees.batch import Draft
from schema.collecting import NewSource, add_sources
from schema.database import make_engine, migrate
from schema.doctor import examine
from schema.gates import Candidate
from schema.home import data_home
from schema.models import Build
from schema.publishing import verify_build
from schema.releases import list_releases, release_history

NAME = "chat"
DOCUMENTS = 400
BUDGET = 32
EVERY_SECONDS = 15.0
"""Interval of the schedule: runs follow each other at once, or nearly so."""
PARAMETERS = {"keep": 1, "workers": 1, "distilling": {"max_n": 3, "ngrams": 500, "head": 500}}
PATIENCE_SECONDS = 900.0
TICK = 0.1


Answer = tuple[float, int, bytes]
"""When it came (`time.time`), the number of its context, and the draft."""


class Client(threading.Thread):
    """Asks the service for drafts of the release all the time.

    Attributes:
        store: the service's release; its counters say what came instead of answers.
        answers: all of them.
    """

    def __init__(self, socket: Path, contexts: NDArray[np.int32]) -> None:
        """Prepare.

        Args:
            socket: of the service.
            contexts: int32 [contexts, width].
        """
        super().__init__(daemon=True)
        # A second: what is counted as unanswered is the service's doing, not that of a busy machine.
        self.store = RemoteStore(socket, NAME, deadline=1.0, breaker=Breaker(longest=0.1))
        self.answers: list[Answer] = []
        self._contexts = contexts
        self._stopped = threading.Event()

    def run(self) -> None:
        """Ask."""
        drafter, counters = self.store.drafter(), self.store.counters
        for place in itertools.cycle(range(len(self._contexts))):
            answered = counters["answered"]
            (draft,) = drafter.draft(self._contexts[place : place + 1], BUDGET)
            if counters["answered"] > answered:
                self.answers.append((time.time(), place, content(draft)))
            if self._stopped.wait(0.02):
                break

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join()
        self.store.close()


def content(draft: Draft) -> bytes:
    """Return a draft as bytes."""
    return b"".join(part.tobytes() for part in (draft.tree.tokens, draft.tree.parents, draft.tree.levels))


@dataclasses.dataclass(frozen=True)
class Move:
    """The release moved to a build.

    Attributes:
        at: when, as `time.time`.
        drafts: what the build drafts for each context.
    """

    at: float
    drafts: list[bytes]


class Site:
    """All of it, in the data folder of this process.

    Attributes:
        flows: Prefect.
        texts: folder with the one file of the collection.
        client: of the lookup service, once `serve` has started it.
    """

    def __init__(self, workspace: Workspace, days: int) -> None:
        """Make an empty catalogue with the collection, and start Prefect.

        Args:
            workspace: where all of it lies.
            days: how often the collection will change.
        """
        self.work, self.texts = workspace.work, workspace.work / "texts"
        for folder in (data_home(), self.texts, self.work / "prefect"):
            shutil.rmtree(folder, ignore_errors=True)
        self.texts.mkdir()
        path = workspace.data / "corpora" / "chat_sharegpt.jsonl.zst"
        lines = itertools.islice(read_lines(path), DOCUMENTS + 3 * days)
        self._lines = [line.rstrip(b"\n") for line in lines if line is not None]
        self.write(0)
        migrate()
        self._engine = make_engine(poolclass=NullPool)
        self.transaction = sessionmaker(self._engine, expire_on_commit=False).begin
        with self.transaction() as session:
            source = NewSource(str(self.texts), globs=("*.jsonl",))
            add_sources(session, NAME, [source], str(workspace.data / "tokenizers" / TOKENIZER))
        self.flows = Flows(self.work, "rebuild/default")
        self._socket, self._http = data_home() / "lookup.sock", free_port()
        self._lookup: Kept | None = None
        self.client: Client | None = None
        self._contexts = np.empty((0, 0), np.int32)
        self._drafts: dict[int, list[bytes]] = {}

    def documents(self, day: int) -> list[bytes]:
        """Return the records of a day: three new ones, two fewer old ones than the day before."""
        return self._lines[2 * day : DOCUMENTS + 3 * day]

    def write(self, day: int) -> None:
        """Replace the collection's file by that of a day."""
        new = self.texts / "new"
        new.write_bytes(b"\n".join(self.documents(day)) + b"\n")
        new.replace(self.texts / "texts.jsonl")

    def schedule(self) -> None:
        """Have `rebuild` run all the time; also after a Prefect that gave up has deployed it anew."""

        def scheduled() -> bool:
            self.flows.schedule(EVERY_SECONDS, PARAMETERS)
            return True

        self.wait_for(scheduled, "Prefect's server does not answer")

    def serve(self, contexts: NDArray[np.int32]) -> None:
        """Start the lookup service, and a client."""
        self._contexts = contexts
        arguments = (
            "draftstore", "serve", "--release", NAME, "--release", f"{NAME}-crest", "--backend", "lmdb",
            "--socket", self._socket, "--http", f"127.0.0.1:{self._http}", "--workers", 2,
        )  # fmt: skip
        self._lookup = Kept("lookup service", arguments, self.work / "lookup.log")
        for name in (NAME, f"{NAME}-crest"):
            self.wait_for(lambda name=name: ask_status(str(self._socket), name) == 0, f"no drafts of {name}")  # type: ignore[misc]
        self.require_live()
        self.client = Client(self._socket, contexts)
        self.client.start()

    def wait_for(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait until something is true, as a service manager that starts again whatever ends.

        Raises:
            SystemExit: it takes too long.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            self.revive()
            try:
                if condition():
                    return
            except TROUBLE:
                pass
            time.sleep(TICK)
        raise SystemExit(otherwise)

    def revive(self) -> None:
        """Start again what has ended as a whole."""
        for each in self._kept:
            each.revive()

    def roles(self) -> dict[str, int]:
        """Return a process id of each role."""
        found = self.flows.processes() | database_roles(data_home())
        if self._lookup:
            found |= lookup_roles(Service(str(self._socket), self._lookup.process, self._http))
        return {role: pid for pid, role in found.items()}

    def wait_until_answered(self) -> None:
        """Wait for an answer of the present service; workers of one that was killed answer for some time yet.

        Raises:
            SystemExit: there is none.
        """
        assert self.client
        self.wait_for(lambda: "lookup worker" in self.roles(), "no lookup worker runs")
        answers, now = self.client.answers, time.time()
        self.wait_for(lambda: answers[-1][0] > now, "the service does not answer any more")

    def completed(self, since: datetime) -> bool:
        """Return True if a run that began since then has come to its end."""
        return self.flows.count("COMPLETED", since) > 0

    def require_live(self) -> str:
        """Read every byte of the live stores, draft from them, and note what builds draft; return the path.

        Raises:
            SystemExit: one is not whole.
        """
        with self.transaction() as session:
            live = {release.name: Candidate.of(release.build) for release in list_releases(session)}
            builds = {move.to_build for move in release_history(session, NAME)}
            paths = {id_: made.path for id_ in builds if (made := session.get(Build, id_))}
        for name, build in live.items():
            # Open, so that a run which moves the release on cannot remove it now.
            with closing(open_store(Path(build.path))) as store:
                problems = verify_build(build)
                if problems:
                    raise SystemExit(f"release {name}: {problems}")
                store.drafter().session([319, 1799, 1546]).propose(8)
        if len(self._contexts):
            for id_ in paths.keys() - self._drafts.keys():
                self._drafts[id_] = drafts_of(Path(paths[id_]), self._contexts)
        return live[NAME].path

    def moves(self) -> list[Move]:
        """Return the moves of the release to builds that `require_live` has seen, oldest first."""
        with self.transaction() as session:
            moves = [(move.moved_at.timestamp(), move.to_build) for move in release_history(session, NAME)]
        return [Move(at, self._drafts[id_]) for at, id_ in moves if id_ in self._drafts]

    def findings(self) -> list[str]:
        """Return what `draftstore doctor` finds."""
        return [finding.what for finding in examine(self.transaction, data_home(), verify_build)]

    @property
    def _kept(self) -> list[Kept]:
        return [each for each in (self._lookup, self.flows.kept) if each]

    def stop(self) -> tuple[list[Answer], dict[str, int]]:
        """End client, service and Prefect; return the client's answers and counters."""
        if self.client:
            self.client.stop()
        for each in self._kept:
            each.stop()
        return (self.client.answers, self.client.store.counters.as_dict()) if self.client else ([], {})

    def close(self) -> None:
        """End all of it."""
        self.stop()
        self._engine.dispose()
        subprocess.run([*COMMAND, "db", "stop"], check=False, stdout=subprocess.DEVNULL)


def drafts_of(path: Path, contexts: NDArray[np.int32]) -> list[bytes]:
    """Return what a store drafts for each context."""
    with closing(open_store(path)) as store:
        drafter: Any = store.drafter()
        return [content(draft) for draft in drafter.draft(contexts, BUDGET)]
