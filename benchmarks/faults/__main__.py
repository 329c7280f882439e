"""A fault-injection test of the whole system, with a judge: `python -m benchmarks.faults`.

The system is a constantly changing collection, `rebuild` on Prefect as in `make prefect`, an embedded PostgreSQL, a
lookup service, and a decoding worker that uses it. Meanwhile, any of their processes is killed with SIGKILL, the
database hangs, the disk of the stores fills up (as root: a small tmpfs), and garbage is sent to every socket. Programs
that end are restarted, as by a service manager. Clients constantly request drafts and completions.

The judge requires that every draft is that of the build that it names, and every completion equals that without drafts;
that a fault accompanies every failed run and every client without answers; that the last run completes, and its store
holds what the source holds; that `draftstore catalogue list --check` finds nothing, and no process is left over.

The last line of stdout is one JSON document, also written to OUT/faults.json. Exit status 1 if the judge objects.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.faults --work ~/bench --seconds 3600
"""

import argparse
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.common import SEED, add_arguments, open_workspace
from benchmarks.faults.events import AWAY, FULL, cause, disturb, plan, send_strange
from benchmarks.faults.site import FAILED, NAME, PROMPTS, Event, Site, command, complete
from benchmarks.measure import progress
from benchmarks.processes import NO_ANSWER, ask
from benchmarks.report import describe_machine, finish, show_table
from draftstore.storage.manifest import manifest_digest
from draftstore.stores.registry import open_store
from draftstore.stores.rest.store import RestStore

CONTEXTS, WIDTH, BUDGET = 100, 16, 32
GAP_SECONDS = 3.0  # without an answer: these need a cause
TAKES_DOWN = {"drafts": ("lookup",), "completions": ("worker",)}
"""Programs whose deaths may keep a client waiting."""
SPOILS = ("prefect", "database", AWAY, FULL)
"""Faults that may make a flow run fail."""
Drafted = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""Build, context number, tokens and parents of a draft."""


class Watch:
    """Clients that constantly send requests, and their results; contexts are int32 [contexts, width].

    Attributes:
        answers: number of answers by client.
        gaps: begin and end of each client's pauses longer than `GAP_SECONDS`.
        wrong: number of completions with a different text.
    """

    def __init__(self, site: Site, contexts: NDArray[np.int32]) -> None:
        self.answers, self.wrong = Counter[str](), 0
        self.gaps: dict[str, list[tuple[float, float]]] = {name: [] for name in TAKES_DOWN}
        self._site, self._contexts, self._drafted = site, contexts, Counter[Drafted]()
        self._stopped = threading.Event()
        clients = (("drafts", self._draft, 0.02), ("completions", self._complete, 0.2))
        self._threads = [threading.Thread(target=self._ask, args=client) for client in clients]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str, question: Callable[[int], bool], pause: float) -> None:
        """Send consecutive requests; each returns whether it was answered, or raises one of `NO_ANSWER`."""
        last = time.monotonic()
        for number in itertools.count():
            answered, stopped = False, self._stopped.wait(pause)
            with suppress(*NO_ANSWER):
                answered = question(number)
            now = time.monotonic()
            if (answered or stopped) and now - last > GAP_SECONDS:
                self.gaps[name].append((last, now))
            if answered:
                self.answers[name], last = self.answers[name] + 1, now
            if stopped:
                break

    def _draft(self, number: int) -> bool:
        place = number % CONTEXTS
        body = {"release": NAME, "contexts": [self._contexts[place].tolist()], "budget": BUDGET}
        status, found = ask(f"{self._site.programs['lookup'].url}/v1/draft", body)
        if status == 200:
            nodes = found["drafts"][0]["nodes"]
            tokens, parents = (tuple(node[key] for node in nodes) for key in ("token", "parent"))
            self._drafted[found["build"], place, tokens, parents] += 1
        return status == 200

    def _complete(self, number: int) -> bool:
        prompt = PROMPTS[number % len(PROMPTS)]
        self.wrong += complete(self._site.programs["worker"].url, prompt) != self._site.texts[prompt]
        return True

    def wrong_drafts(self, stores: Sequence[Path]) -> int:
        """Return the number of drafts that differ from those of the build that they name."""
        right = set[Drafted]()
        for path in stores:
            with closing(open_store(path)) as store:
                drafter: Any = store.drafter()
                for place, draft in enumerate(drafter.draft(self._contexts, BUDGET)):
                    tokens, parents = draft.tree.tokens.tolist(), draft.tree.parents.tolist()
                    right.add((manifest_digest(path)[:16], place, tuple(tokens), tuple(parents)))
        return sum(count for each, count in self._drafted.items() if each not in right)

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    """Run the test, judge, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, help="how long (default: 3600; quick: 60)")
    args = parser.parse_args()
    seconds = args.seconds or (60.0 if args.quick else 3600.0)
    with open_workspace(args) as space:
        with closing(Site(space)) as site:
            site.start()
            figures, problems = run(site, seconds)
        lines = (" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))
        problems["processes left over"] = [line for line in lines if str(site.home) in line]
    problems = {what: found for what, found in problems.items() if found}
    show_table("faults", ["", "value"], [[name, str(value)] for name, value in figures.items()])
    for what, found in problems.items():
        print(f"OBJECTION, {what}: {found}")
    about = describe_machine(("uvloop", "lmdb", "prefect")) | {"quick": args.quick, "seconds": seconds}
    finish(args.out, "faults", about | figures | {"problems": problems})
    if problems:
        sys.exit(1)


def run(site: Site, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inject faults, let the system recover, and judge; return figures and objections."""
    with closing(RestStore.open(builds()[0])) as store:
        ids = np.random.default_rng(SEED).integers(0, store.manifest.counts["tokens"], CONTEXTS)
        tokens = np.asarray(store.index.tokens[: ids.max() + WIDTH], np.int32) % store.manifest.vocab_size
        contexts = np.array([tokens[start : start + WIDTH] for start in ids.tolist()])
    watch, planned, faults = Watch(site, contexts), plan(seconds), list[Future[Event]]()
    sent, stopped, begin = Counter[str](), threading.Event(), time.monotonic()
    with ThreadPoolExecutor() as threads:
        threads.submit(send_strange, site, sent, stopped)
        while (now := time.monotonic() - begin) < seconds:
            site.revive()
            if not site.is_running():
                site.change_texts()
                site.request_run()
            while planned and planned[0][0] <= now:
                progress(f"{now:6.0f} s: {planned[0][1]}")
                faults.append(threads.submit(disturb, site, planned.pop(0)[1], max(4.0, seconds / 60)))
            time.sleep(0.25)
        stopped.set()
    progress("left alone")
    site.wait_for_run()
    watch.stop()
    figures, problems = judge(site, watch, [each.result() for each in faults])
    figures["strange_requests"] = dict(sent)
    for name in ("worker", "lookup"):  # what has stores open
        site.programs[name].close()
    command("catalogue", "prune", "--keep", 1)
    checked = command("catalogue", "list", "--check", "full")
    problems["draftstore catalogue list"] = [each["what"] for each in checked["findings"]]
    return figures, problems


def judge(site: Site, watch: Watch, events: Sequence[Event]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures and the objections."""
    begin, stores, gaps = site.runs[0].end, builds(), watch.gaps
    wanted, failed = len(set(site.documents())), [each for each in site.runs if each.what == FAILED]
    with closing(open_store(stores[0])) as store:
        held = store.manifest.counts["documents"]
    longest = {name: max([end - start for start, end in each] or [0.0]) for name, each in gaps.items()}
    figures: dict[str, Any] = {
        "answers": dict(watch.answers),
        "longest_seconds_without_an_answer": {name: round(each, 1) for name, each in longest.items()},
        "faults": dict(Counter(event.what for event in events)),
        "runs, failed, builds": [len(site.runs), len(failed), len(stores)],
    }
    return figures, {
        "wrong drafts": watch.wrong_drafts(stores),
        "wrong completions": watch.wrong,
        "seconds without an answer and without a fault": [
            (name, round(start - begin), round(end - begin))
            for name, each in gaps.items()
            for start, end in each
            if not cause(start, end, events, TAKES_DOWN[name])
        ],
        "failed without a fault": [each for each in failed if not cause(*each[1:], events, SPOILS)],
        "the last run": failed[-1:] if site.runs[-1] in failed else [],
        "documents": "" if held == wanted else f"{held} in the store, {wanted} in the source",
    }


def builds() -> list[Path]:
    """Return the folders of the finished REST stores, newest first."""
    found = command("catalogue", "list", "--kind", "rest", "--state", "finished", "--limit", 100_000)
    return [Path(each["path"]) for each in found]


if __name__ == "__main__":
    main()
