"""A system's life in which everything fails that can, and a judge: `python -m benchmarks.faults`.

A collection whose texts change all the time, `rebuild` on Prefect as `make prefect` runs it, an embedded PostgreSQL of
its own, a lookup service with two workers, and a decoding worker with a small model that asks it. Meanwhile any process
of each is killed with signal 9, the database hangs, the disk of the stores is filled (as root: a small tmpfs), and
strange bytes go to every socket. Whatever ends as a whole is started again, as a service manager does. Clients ask all
the time: for drafts in frames and in JSON, and for greedy completions.

The judge wants: every draft is that of the build that it names (in frames, of a build of the release), and every
completion that without drafts; who gets no answer, or a run that fails, has a fault beside it; the last run completes,
and its store holds exactly what the source holds; `draftstore doctor` finds no problem, and no process is left over.

Tables first; the last line of stdout is one JSON document, also written to OUT/faults.json. Exit status 1 if the judge
objects.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.faults --work ~/bench --seconds 3600
"""

import argparse
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import SEED, add_arguments, open_workspace
from benchmarks.faults.events import AWAY, FULL, PROGRAMS, Event, Faults, Stranger, cause
from benchmarks.faults.site import NAME, PROMPTS, Site, command, complete
from benchmarks.measure import progress
from benchmarks.processes import NO_ANSWER, anonymous_bytes, ask
from benchmarks.report import describe_machine, finish, show_table
from draftstore.remote.breaker import Breaker
from draftstore.remote.client import RemoteStore
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store

CONTEXTS, WIDTH, BUDGET = 100, 16, 32
GAP_SECONDS = 1.0
"""Time without an answer that needs a cause."""
TAKES_DOWN = {"frames": ("lookup",), "JSON": ("lookup",), "completions": ("worker",)}
"""Programs whose kills may keep a client waiting."""
Tree = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens and parents of a draft."""


class Client(threading.Thread):
    """Asks one question after the other.

    Attributes:
        answers: their number.
        gaps: when each pause began and ended that was longer than `GAP_SECONDS`.
    """

    def __init__(self, name: str, questions: Sequence[Callable[[], bool]], pause: float) -> None:
        """Prepare; a question returns whether it was answered, or raises one of `NO_ANSWER`."""
        super().__init__(name=name, daemon=True)
        self.answers = 0
        self.gaps: list[tuple[float, float]] = []
        self._questions, self._pause, self._stopped = questions, pause, threading.Event()

    def run(self) -> None:
        """Ask."""
        last = time.monotonic()
        for question in itertools.cycle(self._questions):
            answered = False
            with suppress(*NO_ANSWER):
                answered = question()
            now = time.monotonic()
            if answered:
                self.answers += 1
                if now - last > GAP_SECONDS:
                    self.gaps.append((last, now))
                last = now
            if self._stopped.wait(self._pause):
                break
        if time.monotonic() - last > GAP_SECONDS:
            self.gaps.append((last, time.monotonic()))

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self.join()


class Watch:
    """The clients, and what they were answered.

    Attributes:
        clients: all of them.
        wrong: completions that were other texts.
    """

    def __init__(self, site: Site, contexts: NDArray[np.int32]) -> None:
        """Prepare; contexts are int32 [contexts, width]."""
        self.wrong = 0
        self._site, self._contexts = site, contexts
        self._named: Counter[tuple[str, int, Tree]] = Counter()
        self._unnamed: Counter[tuple[int, Tree]] = Counter()
        # A second: what stays unanswered is the service's doing, not that of a busy machine.
        self._remote = RemoteStore(site.socket, NAME, deadline=1.0, breaker=Breaker(longest=0.1))
        self._drafter = self._remote.drafter()
        places = range(len(contexts))
        self.clients = [
            Client("frames", [lambda place=place: self._frame(place) for place in places], 0.01),  # type: ignore[misc]
            Client("JSON", [lambda place=place: self._json(place) for place in places], 0.1),  # type: ignore[misc]
            Client("completions", [lambda prompt=prompt: self._complete(prompt) for prompt in PROMPTS], 0.2),  # type: ignore[misc]
        ]

    def _frame(self, place: int) -> bool:
        before = self._remote.counters["answered"]
        (draft,) = self._drafter.draft(self._contexts[place : place + 1], BUDGET)
        answered = self._remote.counters["answered"] > before
        if answered:
            self._unnamed[place, (tuple(draft.tree.tokens.tolist()), tuple(draft.tree.parents.tolist()))] += 1
        return answered

    def _json(self, place: int) -> bool:
        asked = {"release": NAME, "contexts": [self._contexts[place].tolist()], "budget": BUDGET}
        status, found = ask(f"{self._site.programs['lookup'].url}/v1/draft", asked)
        if status != 200:
            return False
        nodes = found["drafts"][0]["nodes"]
        tree = tuple(node["token"] for node in nodes), tuple(node["parent"] for node in nodes)
        self._named[found["build"], place, tree] += 1
        return True

    def _complete(self, prompt: str) -> bool:
        text = complete(self._site.programs["worker"].url, prompt)
        self.wrong += text != self._site.texts[prompt]
        return True

    def wrong_drafts(self, stores: Sequence[Path]) -> int:
        """Return how many drafts were not those of the build that they name, or of any build."""
        named, unnamed = set[tuple[str, int, Tree]](), set[tuple[int, Tree]]()
        for path in stores:
            build = manifest_digest(path)[:16]
            with closing(open_store(path)) as store:
                drafter: Any = store.drafter()
                for place, draft in enumerate(drafter.draft(self._contexts, BUDGET)):
                    tree = tuple(draft.tree.tokens.tolist()), tuple(draft.tree.parents.tolist())
                    named.add((build, place, tree))
                    unnamed.add((place, tree))
        wrong = sum(count for each, count in self._named.items() if each not in named)
        return wrong + sum(count for each, count in self._unnamed.items() if each not in unnamed)

    def stop(self) -> None:
        """End."""
        for client in self.clients:
            client.stop()
        self._remote.close()


def main() -> None:
    """Run it, judge, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, help="how long (default: 3600; quick: 60)")
    parser.add_argument("--kills", type=int, help="of processes (default: one in 18 seconds)")
    parser.add_argument(
        "--disk-mb", type=int, default=256 if os.geteuid() == 0 else 0,
        help="megabytes of the file system of the stores; 0: it is not filled (default: 256, without root 0)",
    )  # fmt: skip
    args = parser.parse_args()
    seconds = args.seconds or (60.0 if args.quick else 3600.0)
    kills = args.kills or max(len(PROGRAMS), round(seconds / 18))
    with open_workspace(args) as space:
        site = Site(space, args.disk_mb)
        with closing(site):
            site.start()
            figures, problems = run(site, seconds, kills)
        left = left_over(site.home)
        problems |= {"processes left over": left} if left else {}
    show_table("faults", ["", "value"], [[name, str(value)] for name, value in figures.items()])
    for what, found in problems.items():
        print(f"OBJECTION, {what}: {found}")
    about = describe_machine(("uvloop", "lmdb", "prefect")) | {"quick": args.quick, "seconds": seconds}
    finish(args.out, "faults", about | figures | {"problems": problems})
    if problems:
        sys.exit(1)


def run(site: Site, seconds: float, kills: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Disturb the system, leave it alone, and judge; return figures and objections."""
    (store,) = builds("rest")
    with closing(open_store(store)) as opened:
        tokens = np.asarray(opened.index.tokens)  # type: ignore[attr-defined]
        starts = np.random.default_rng(SEED).integers(0, len(tokens) - WIDTH, CONTEXTS)
        contexts = np.array([tokens[start : start + WIDTH] for start in starts.tolist()], np.int32)
        contexts[contexts >= opened.manifest.vocab_size] = 1
    watch, stranger = Watch(site, contexts), Stranger(site, SEED)
    faults = Faults(site, seconds, kills, window=max(4.0, seconds / 60), seed=SEED)
    memory: dict[str, list[int]] = {name: [] for name in site.programs}
    for thread in (*watch.clients, stranger):
        thread.start()
    progress(f"{seconds:,.0f} seconds, {kills} kills")
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds or not site.idle:
        site.revive()
        if (ended := site.look()) is not None:
            progress(f"{now:6.0f} s: run {ended.state} in {ended.end - ended.begin:.0f} s {ended.message}")
        if now < seconds:
            if site.idle:
                site.change_texts()
                site.request_run()
            faults.act(now)
            for name, program in site.programs.items():
                memory[name].append(
                    max(anonymous_bytes(each.pid) for each in program.family()) if program.family() else 0
                )
        time.sleep(0.25)
    faults.join()
    stranger.stop()
    progress("left alone")
    last = None
    while last is None:
        site.revive()
        site.request_run()
        last = site.look()
        time.sleep(0.5)
    time.sleep(5.0)
    watch.stop()
    return judge(site, watch, faults.events, memory, stranger.sent)


def judge(
    site: Site, watch: Watch, events: Sequence[Event], memory: dict[str, list[int]], strange: Counter[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures, and what should not be."""
    gaps = {client.name: client.gaps for client in watch.clients}
    begin = site.runs[0].end
    spoiled = [run for run in site.runs if run.state != "COMPLETED"]
    spoils = ("prefect", "database", AWAY, FULL)
    live = [path for path in builds("rest", live=True)]
    with closing(open_store(live[0])) as store:
        held = store.manifest.counts["documents"]
    figures: dict[str, Any] = {
        "answers": {client.name: client.answers for client in watch.clients},
        "longest_seconds_without_an_answer": {
            name: round(max((end - start for start, end in each), default=0.0), 1) for name, each in gaps.items()
        },
        "kills": dict(Counter(event.what for event in events if event.what in PROGRAMS)),
        "outages": dict(Counter(event.what for event in events if event.what not in PROGRAMS)),
        "strange_requests": dict(strange),
        "runs": dict(Counter(run.state for run in site.runs)),
        "builds": len(builds("rest")),
        "memory_mb": {
            name: [round(sizes[place] / 1e6) for place in (len(sizes) // 5, -1)] for name, sizes in memory.items() if sizes
        },
    }  # fmt: skip
    wanted = len(set(site.documents()))
    problems: dict[str, Any] = {
        "wrong drafts": watch.wrong_drafts(builds("rest")),
        "wrong completions": watch.wrong,
        "seconds without an answer and without a fault": [
            [name, round(start - begin, 1), round(end - begin, 1)]
            for name, each in gaps.items()
            for start, end in each
            if not cause(start, end, events, TAKES_DOWN[name])
        ],
        "runs that failed without a fault": [
            run for run in spoiled if not cause(run.begin, run.end, events, spoils)
        ],
        "the last run": "" if site.runs[-1].state == "COMPLETED" else site.runs[-1],
        "documents": "" if held == wanted else f"{held} in the store, {wanted} in the source",
    }
    for name in ("worker", "lookup"):  # what has stores open
        site.programs.pop(name).stop()
    command("builds", "prune", "--keep", 1)
    problems["draftstore doctor"] = [each["what"] for each in command("doctor", "--full")["findings"]]
    return figures, {what: found for what, found in problems.items() if found}


def builds(kind: str, live: bool = False) -> list[Path]:
    """Return the folders of the finished builds of a kind, newest first, or of those that a release points at."""
    found = command("builds", "list", "--kind", kind, "--state", "finished", "--limit", 100_000)
    return [Path(each["path"]) for each in found if each["releases"] or not live]


def left_over(home: Path) -> list[str]:
    """Return the command lines of processes that work with a data folder, besides this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                words = " ".join(process.cmdline())
                if process.environ().get("DRAFTSTORE_HOME") == str(home) or str(home) in words:
                    found.append(f"{process.pid}: {words[:200]}")
    return found


if __name__ == "__main__":
    main()
