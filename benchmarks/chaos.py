"""An hour of a system's life in which everything fails that can: `python -m benchmarks.chaos`.

A lookup service with two workers, a decoding worker with a small model, and flows one after the other, each of which
builds a store from one of a few corpora, moves the release to it, and removes older builds; Prefect as `make prefect`
runs it, an embedded PostgreSQL of its own, stores on a small file system (that takes root). Meanwhile processes of each
kind are killed with signal 9, the database is stopped, killed and frozen for a while, and the disk is filled. Whatever
ends by itself is started again, as a service manager would. Clients ask all the time, and compare every answer: drafts,
over frames and JSON, with those of the build that they name (a fixed SOURCE_DATE_EPOCH makes a build the same each
time), and greedy completions with those without drafts, which a worker without drafters gave before. In the end the
service is stopped, builds are pruned, and what is left over is counted. Tables first; the last line of stdout is one
JSON document, also written to OUT/chaos.json, with a picture beside it.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.chaos --work ~/bench --seconds 3600
"""

import argparse
import itertools
import json
import os
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos_clients import Client, completions, drafts
from benchmarks.chaos_faults import KINDS, Faults, plan_faults
from benchmarks.chaos_judge import judge, show
from benchmarks.chaos_orphans import orphaned_processes, orphans_of_builds
from benchmarks.chaos_site import COMMAND, RELEASE, Site, use_home
from benchmarks.common import add_arguments, open_workspace
from benchmarks.loadgen import Load
from benchmarks.loadplan import Question, make_plan
from benchmarks.loadrun import RunningLoad
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, new_axes
from schema.database import close

QUICK_KINDS = ("lookup worker", "lookup web", "decoding worker", "flow", "postgres")
TICK = 0.25
ROUNDS = 400
"""Looks at the memory, all in all."""
FRAMES = 400
LAST_SECONDS = 5.0
"""Time after the last fault in which all must be well."""


def main() -> None:
    """Run it and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, help="how long (default: 3600; quick: 30)")
    parser.add_argument(
        "--kills", type=float, default=20.0, help="of each kind in an hour (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=float, default=100.0, help="drafts asked for a second (default: %(default)s)"
    )
    parser.add_argument(
        "--corpora", type=int, default=4, help="that flows build in turn (default: %(default)s)"
    )
    parser.add_argument(
        "--disk-mb", type=int, default=256 if os.geteuid() == 0 else 0,
        help="megabytes of the file system of the stores; 0: it is not filled (default: 256, without root 0)",
    )  # fmt: skip
    args = parser.parse_args()
    args.seconds = args.seconds or (30.0 if args.quick else 3600.0)
    if not args.disk_mb:
        progress("the disk is not filled: a file system of its own takes root, and --disk-mb")
    with open_workspace(args) as workspace:
        use_home(workspace.work)
        site = Site(workspace, args.disk_mb)
        with closing(site):
            figures = run(args, site)
        close()
        figures["orphans"]["processes"] = orphaned_processes(site.home)
    show(figures)
    save_picture(args.out, figures)
    figures["memory"] = {
        role: {name: track[name] for name in ("first", "most", "last", "growth_bytes")}
        for role, track in figures["memory"].items()
    }
    finish(
        args.out, "chaos", describe_machine(("uvloop", "lmdb", "prefect")) | {"quick": args.quick} | figures
    )


def run(args: argparse.Namespace, site: Site) -> dict[str, Any]:
    """Set everything up, let it fail, and judge."""
    progress("completions without drafts")
    texts = site.reference()
    site.write_corpora(2 if args.quick else args.corpora, 20 if args.quick else 150, texts)
    progress("prefect")
    site.flows.wait_until_up()
    stores = site.build_all()
    site.flows.runs.clear()
    contexts = site.contexts(FRAMES)
    plan, trace = site.work / "plan-chaos.npz", site.work / "chaos-trace.npz"
    question = Question(RELEASE, "", contexts[:, None])
    make_plan([question], {RELEASE: stores}, {RELEASE: "lmdb"}).save(plan)
    progress("lookup service and decoding worker")
    site.serve()
    clients = [
        Client("drafts in JSON", drafts(site.urls["lookup"], RELEASE, stores, contexts[:50]), 0.2),
        Client("completions", completions(site.urls["worker"], texts), 0.2),
    ]
    load = Load(str(site.socket), str(plan), 2 * args.seconds + 1800, 8, args.rate, trace=str(trace))
    asking = RunningLoad(load)
    for client in clients:
        client.start()
    kinds = QUICK_KINDS if args.quick else KINDS
    kills = max(1, round(args.kills * args.seconds / 3600))
    window = max(4.0, args.seconds / 60)
    faults = Faults(plan_faults(args.seconds, kills, kinds, 2), site.roles, window, site.disk)
    progress(f"chaos, {args.seconds:,.0f} seconds, {kills} kills of each of {len(kinds)} kinds")
    memory = disturb(args.seconds, site, faults)
    last = site.flows.run(site.parameters(site.corpora[0]))
    progress(f"the last run: {last.state}")
    time.sleep(LAST_SECONDS)
    for client in clients:
        client.stop()
    asking.stop()
    loaded = asking.result()
    with np.load(trace) as arrays:
        arrivals = np.sort(arrays["due"] + arrays["latency"])
    return {
        "seconds": args.seconds, "rate": args.rate, "window_seconds": window, "disk_mb": args.disk_mb,
        "load_average": os.getloadavg()[0],
        **judge(loaded, arrivals, clients, faults, site.flows.runs, memory),
        "starts": {each.name: each.starts for each in site.kept},
        "last_run": last.state,
        "orphans": end_service(site),
    }  # fmt: skip


def disturb(seconds: float, site: Site, faults: Faults) -> dict[str, list[tuple[float, int]]]:
    """Let the system live and fail; return the memory of each role over time, in seconds and bytes."""
    begin = time.monotonic()
    memory: dict[str, list[tuple[float, int]]] = {}
    corpora = itertools.cycle([*site.corpora[1:], site.corpora[0]])
    corpus, look_at = next(corpora), 0.0
    while (now := time.monotonic() - begin) < seconds:
        for each in site.kept:
            each.revive()
        run = site.flows.look()
        if run:
            progress(f"{now:6.0f} s: flow {run.state} in {run.end - run.begin:.0f} s {run.message[:120]}")
        if site.flows.idle and site.flows.start(site.parameters(corpus)):
            corpus = next(corpora)
        faults.act(now)
        if now >= look_at:
            look_at += max(1.0, seconds / ROUNDS)
            for role, size in site.memory().items():
                memory.setdefault(role, []).append((round(now, 1), size))
        time.sleep(TICK)
    faults.join()
    while not site.flows.idle:
        for each in site.kept:
            each.revive()
        site.flows.look()
        time.sleep(TICK)
    for each in site.kept:
        each.revive()
    return memory


def end_service(site: Site) -> dict[str, Any]:
    """Stop what has stores open, prune, and return what is left over."""
    for each in (site.worker, site.lookup):
        if each:
            each.stop()
    pruned = subprocess.run(
        [*COMMAND, "builds", "prune", "--keep", "1", "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(pruned.stdout)
    removed = Counter(each["what"] for each in found["removed"])
    return {"pruned_at_last": dict(removed), "in_use": found["in_use"], **orphans_of_builds(site.home)}


def save_picture(out: Path, figures: dict[str, Any]) -> None:
    """Draw memory over time, with lines where database and disk were away, and dots for kills."""
    figure, axes = new_axes("resident anonymous memory, the largest process of each role", "seconds", "MB")
    figure.set_size_inches(9, 5)
    for role, track in figures["memory"].items():
        axes.plot(track["at"], np.array(track["bytes"]) / 1e6, label=role, linewidth=1)
    axes.set_ylim(bottom=0)
    for event in figures["events"]:
        if event["end"] > event["begin"]:
            color = "#b3541e" if event["what"].startswith("database") else "#1f5f8b"
            axes.axvspan(event["begin"], event["end"], color=color, alpha=0.15)
        else:
            axes.plot(event["begin"], 1, marker="|", color="#888888")
    axes.legend(frameon=False, fontsize="x-small", ncols=2)
    figure.savefig(out / "chaos_memory.png", dpi=150)


if __name__ == "__main__":
    main()
