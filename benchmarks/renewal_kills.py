"""Scheduled rebuilds that are killed: `python -m benchmarks.renewal_kills`.

Prefect, as `make prefect` runs it, has the flow `rebuild` on a schedule; a lookup service follows the catalogue, and a
client asks it all the time. The collection changes a little, and at a random moment of the next run a process is killed
with signal 9, each kind in turn: that of the flow run and its tasks, Prefect's worker, Prefect's server, PostgreSQL's
postmaster, a worker of the lookup service, or that service's supervisor. Only the service as a whole is started again
from here, as a service manager would. After each kill every live release must be whole, to the byte, and draft, and the
service must answer. Every answer is compared with what the builds draft that were live until then. In the end all is
left alone: a later run must complete, its store must hold what the sources hold, no process and no folder may be left
over, and `draftstore doctor` must find nothing.

Dask takes no part in `rebuild`: what the death of its workers does is in tests/process/test_cluster.py.

The last line of stdout is one JSON document, also written to OUT/renewal_kills.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.renewal_kills --kills 50
"""

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from benchmarks.chaos_flows import ENDS
from benchmarks.chaos_orphans import orphaned_processes, orphans_of_builds
from benchmarks.common import SEED, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.renewal_site import Answer, Move, Site
from benchmarks.report import describe_machine, finish
from draftstore.remote.counters import Outcome
from draftstore.stores.rest.store import RestStore
from draftstore.stores.rest.updating import read_documents
from draftstore.text.digests import digest_keys
from schema import catalogue
from schema.database import close
from schema.home import HOME_VARIABLE, data_home
from schema.models import Build

VICTIMS = (
    "flow", "postgres", "lookup worker", "flow", "prefect worker", "lookup supervisor", "prefect server",
)  # fmt: skip
"""Roles of what is killed, in turn."""
CONTEXTS, WIDTH = 200, 16


class Kill(NamedTuple):
    """A process was killed.

    Attributes:
        victim: its role.
        at: when, as `time.time`.
        running: whether a rebuild was under way.
    """

    victim: str
    at: float
    running: bool


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kills", type=int, default=50, help="how many (default: %(default)s)")
    args = parser.parse_args()
    kills = len(VICTIMS) if args.quick else args.kills
    with open_workspace(args) as workspace:
        os.environ[HOME_VARIABLE] = str(workspace.work / "home")
        os.environ.pop("DRAFTSTORE_DATABASE_URL", None)
        with closing(Site(workspace, kills + 2)) as site:
            figures = run(site, kills)
        close()
        figures["problems"]["processes left over"] = orphaned_processes(data_home())
    problems = {what: found[:5] for what, found in figures.pop("problems").items() if found}
    finish(args.out, "renewal_kills", describe_machine(("prefect",)) | {"quick": args.quick} | figures)
    if problems:
        raise SystemExit(f"not as it should be: {problems}")


def run(site: Site, kills: int) -> dict[str, Any]:
    """Kill as often as told; return what was seen, with what should not be as `problems`.

    Raises:
        SystemExit: something does not come back.
    """
    site.flows.wait_until_up()
    begin = datetime.now(UTC)
    site.schedule()
    site.wait_for(lambda: site.completed(begin), "the first run does not complete")
    site.serve(some_contexts(RestStore.open(site.require_live())))
    whole = seconds_of_a_run(site)
    site.require_live()
    progress(f"a run takes {whole:.0f} s")
    done, moments = [], random.Random(SEED)
    for number in range(kills):
        site.write(number + 2)
        done.append(kill(site, VICTIMS[number % len(VICTIMS)], moments.uniform(0, whole)))
        site.wait_until_answered()
        site.require_live()
        progress(f"{number + 1} of {kills}: {done[-1].victim}, running: {done[-1].running}")
    alone = datetime.now(UTC)
    with site.transaction() as session:
        states = Counter(session.scalars(select(Build.state)))
    site.wait_for(lambda: site.completed(alone), "no run completes any more")
    held = len(np.unique(digest_keys(read_documents(RestStore.open(site.require_live())))))
    expected = len(site.documents(kills + 1))
    runs = {state: site.flows.count(state, begin) for state in ENDS}
    moves = site.moves()
    answers, counters = site.stop()
    wrong, lag = compare(answers, moves)
    catalogue.prune(site.transaction, data_home(), 1)
    problems = {
        "documents": [] if held == expected else [f"{held} in the store, {expected} in the sources"],
        "wrong answers": wrong,
        "draftstore doctor": site.findings(),
        **orphans_of_builds(data_home()),
    }
    return {
        "kills": kills,
        "by_victim": dict(Counter(each.victim for each in done)),
        "while_a_run_was_under_way": sum(each.running for each in done),
        "whole_seconds": round(whole, 1),
        "minutes": round((alone - begin).total_seconds() / 60, 1),
        "runs": {state: number for state, number in runs.items() if number},
        "releases_moved": len(moves),
        "builds_before_the_end": dict(states),
        "answers": len(answers),
        "wrong_answers": len(wrong),
        "unanswered": {
            name: counters[name] for name in Outcome if counters[name] and name != Outcome.ANSWERED
        },
        "longest_seconds_without_an_answer": longest_pauses([at for at, *_ in answers], done),
        "longest_seconds_behind_the_catalogue": round(lag, 1),
        "problems": problems,
    }


def some_contexts(store: RestStore) -> NDArray[np.int32]:
    """Return int32 [contexts, width]: pieces of a store's texts."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(store.index.tokens), WIDTH)
    inside = np.flatnonzero((windows[::WIDTH] < store.index.vocab_size).all(axis=1)) * WIDTH
    chosen: NDArray[np.int32] = windows[
        np.random.default_rng(SEED).choice(inside, CONTEXTS, replace=False)
    ].astype(np.int32)
    return chosen


def seconds_of_a_run(site: Site) -> float:
    """Return how long a run takes after a change, from the start of its process to the end."""
    site.wait_for(lambda: "flow" not in site.roles(), "a run does not end")
    site.write(1)
    site.wait_for(lambda: "flow" in site.roles(), "no run starts")
    begin = time.monotonic()
    site.wait_for(lambda: "flow" not in site.roles(), "a run does not end")
    return time.monotonic() - begin


def kill(site: Site, victim: str, seconds: float) -> Kill:
    """Kill a process some time after a run has begun, or as soon as it is there."""
    site.schedule()
    site.wait_for(lambda: "flow" in site.roles(), "no run starts")
    end = time.monotonic() + seconds
    site.wait_for(lambda: time.monotonic() > end, "")
    while victim not in (roles := site.roles()):
        site.wait_for(lambda: victim in site.roles(), f"no {victim} runs")
    pid, at = roles[victim], time.time()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if victim != "flow":  # which the schedule brings back
        site.wait_for(lambda: site.roles().get(victim, pid) != pid, f"no {victim} comes back")
    return Kill(victim, at, "flow" in roles)


def compare(answers: Sequence[Answer], moves: Sequence[Move]) -> tuple[list[str], float]:
    """Compare answers with what the builds draft that were live until then.

    Args:
        answers: of the service.
        moves: of the release, oldest first.

    Returns:
        Those that are wrong, and the most seconds that one came from a build that was no longer live.
    """
    wrong, lag = [], 0.0
    for at, place, draft in answers:
        later = [move for move in moves if move.at > at]
        until = at
        for move in reversed(moves[: len(moves) - len(later)]):
            if move.drafts[place] == draft:
                lag = max(lag, at - until)
                break
            until = move.at
        else:
            wrong.append(f"context {place} at {at:.1f}")
    return wrong, lag


def longest_pauses(answered: Sequence[float], kills: Sequence[Kill]) -> dict[str, float]:
    """Return the most seconds between two answers after a kill of each victim, until the next kill.

    Args:
        answered: when answers came, ascending.
        kills: what was killed, ascending; there are answers before and after each.
    """
    times, longest = np.array(answered), dict.fromkeys((each.victim for each in kills), 0.0)
    ends = [each.at for each in kills[1:]] + [answered[-1]]
    for each, end in zip(kills, ends, strict=True):
        first = int(np.searchsorted(times, each.at)) - 1
        pauses = np.diff(times[max(first, 0) : int(np.searchsorted(times, end)) + 1])
        longest[each.victim] = round(max(longest[each.victim], *pauses.tolist()), 2)
    return longest


if __name__ == "__main__":
    main()
