"""The lookup service under load for a long time, with all that may happen to it: `python -m benchmarks.soak`.

A load of 80 % of the peak that the service reaches with one worker less, so that it can bear the death of one, while
releases move 20 times in a real catalogue, by publishing and by rollback, and one worker is killed with signal 9.
Every answer is compared with that of the build that it names. Requests fall due at even distances, and what is answered
later than 2 ms counts as late. This machine may stall by itself, so an echo bears the same load before, and another one
answers a few requests beside it all the time: what is late there is not the service's doing. Resident anonymous memory
of every process is taken over time. Tables first; the last line of stdout is
one JSON document, also written to OUT/soak.json, with pictures beside it.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.soak --work ~/bench --seconds 600
"""

import argparse
import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import add_arguments, open_workspace
from benchmarks.echo import echo_plan, echo_server
from benchmarks.loadgen import Load
from benchmarks.loadplan import Question, make_plan
from benchmarks.loadrun import Mover, RunningLoad, run_load
from benchmarks.loadtally import LATE_MS
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, new_axes, show_table
from benchmarks.served import Served, prepare
from benchmarks.service import Service, anonymous_bytes, running
from schema.database import close
from schema.home import HOME_VARIABLE

RELEASES = ("soak-crest", "soak-rest")
MIX = ((RELEASES[0], 1, 0.6), (RELEASES[0], 8, 0.1), (RELEASES[1], 1, 0.3))
"""Release, batch, part of the requests."""
FRAMES = 1000
CONTEXTS = 16_384
BESIDE_RATE = 200.0
"""Requests a second to the echo that runs beside the service."""
AFTER_KILL = 1.0
"""Seconds after the kill in which connections of the killed process are seen to be lost."""
AFTER_MOVE = 1.0
"""Seconds after a move in which late answers are put down to it."""


@dataclasses.dataclass
class Events:
    """What was done to the service; times in seconds from the start of the load.

    Attributes:
        moves: of releases.
        kill: when a worker was killed.
        killed: its process id.
        memory: for each process its role, and resident anonymous bytes at each time.
    """

    moves: list[dict[str, Any]]
    kill: float = -1.0
    killed: int = 0
    memory: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


def main() -> None:
    """Run it and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default: %(default)s)")
    parser.add_argument(
        "--share", type=float, default=0.8, help="part of the peak with a worker less (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that answer (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--moves", type=int, default=20, help="of releases (default: %(default)s)")
    parser.add_argument(
        "--echo-seconds", type=float, help="of the echo before (default: a tenth of --seconds)"
    )
    parser.add_argument("--peak-seconds", type=float, default=5.0, help="default: %(default)s")
    args = parser.parse_args()
    with open_workspace(args) as workspace, ExitStack() as stack:
        os.environ.setdefault(HOME_VARIABLE, str(workspace.work / "home"))
        served = prepare(workspace, quick=args.quick, contexts=CONTEXTS, postgres=False)
        figures = run(args, served, workspace.work, stack)
        close()
    save_pictures(args.out, figures)
    del figures["timeline"]
    for track in figures["memory"]:
        del track["at"]
        track["bytes"] = {"first": track["bytes"][0], "most": max(track["bytes"]), "last": track["bytes"][-1]}
    finish(args.out, "soak", describe_machine(("uvloop", "lmdb")) | {"quick": args.quick} | figures)


def run(args: argparse.Namespace, served: Served, work: Path, stack: ExitStack) -> dict[str, Any]:
    """Find the peak, load the echo, then the service; print the tables."""
    builds = dict(zip(RELEASES, (served.crest, served.rest), strict=True))
    plan_file, echo_file, trace = work / "plan-soak.npz", work / "plan-soak-echo.npz", work / "soak-trace.npz"
    progress("answers of all builds")
    questions = [
        Question(name, "backoff", served.draw(batch, round(FRAMES * part))) for name, batch, part in MIX
    ]
    plan = make_plan(questions, builds)
    plan.save(plan_file)
    echo_plan(plan).save(echo_file)
    movers = [stack.enter_context(Mover(name, stores)) for name, stores in builds.items()]
    log = work / "soak-service.log"
    progress("peak")
    with running(releases=RELEASES, workers=max(1, args.workers - 1), log=log) as smaller:
        peak = run_load(
            Load(smaller.address, str(plan_file), args.peak_seconds, connections=args.connections)
        )
    rate = args.share * peak["answers_per_second"]
    service = stack.enter_context(running(releases=RELEASES, workers=args.workers, log=log))
    echo, _ = stack.enter_context(echo_server())
    load = Load(service.address, str(plan_file), args.seconds, connections=args.connections)
    progress(f"echo, {rate:,.0f} requests a second")
    loaded = dataclasses.replace(load, rate=rate)
    echo_load = dataclasses.replace(loaded, address=echo, plan=str(echo_file))
    before = run_load(dataclasses.replace(echo_load, seconds=args.echo_seconds or args.seconds / 10))
    progress(f"soak, {args.seconds:,.0f} seconds")
    beside = RunningLoad(
        dataclasses.replace(echo_load, rate=BESIDE_RATE, seconds=args.seconds, connections=2)
    )
    soaked = RunningLoad(dataclasses.replace(loaded, trace=str(trace)))
    os.nice(10)  # who publishes would do so from another machine
    events = disturb(service, movers, args.seconds, args.moves)
    figures = {
        "workers": args.workers, "share": args.share, "load_average": os.getloadavg()[0], "mix": MIX,
        "peak": peak, "echo_before": before, "soak": soaked.result(), "echo_beside": beside.result(),
    }  # fmt: skip
    return figures | judge(figures["soak"], events, trace)


def disturb(service: Service, movers: Sequence[Mover], seconds: float, moves: int) -> Events:
    """Move the releases in turn, kill a worker half way, and look at the memory all the while."""
    begin = time.monotonic()
    events = Events([])
    plan = [((i + 1) * seconds / (moves + 1), i) for i in range(moves)]
    kill_at = plan[moves // 2][0] + seconds / (moves + 1) / 2 if moves else seconds / 2
    look_at, step = 0.0, max(0.5, seconds / 300)
    while (now := time.monotonic() - begin) < seconds:
        if now >= look_at:
            look_at += step
            look(service, events, now)
        if plan and now >= plan[0][0]:
            _, i = plan.pop(0)
            move = movers[i % len(movers)].move()
            events.moves.append(move | {"at": move["at"] - begin})
        if not events.killed and now >= kill_at:
            events.killed = service.workers()[0]
            os.kill(events.killed, signal.SIGKILL)
            events.kill = time.monotonic() - begin
        time.sleep(0.05)
    look(service, events, seconds)
    return events


def look(service: Service, events: Events, now: float) -> None:
    """Write down the memory of every process."""
    for pid, role in service.processes().items():
        track = events.memory.setdefault(pid, {"role": role, "at": [], "bytes": []})
        if role == "worker":
            track["role"] = role  # it had no store open when it was seen first
        track["at"].append(round(now, 1))
        track["bytes"].append(anonymous_bytes(pid))


def judge(soaked: dict[str, Any], events: Events, trace: Path) -> dict[str, Any]:
    """Sum up what was wrong, what failed, what was late and when, and how memory grew; print it."""
    begin = soaked["begin"]
    lost = [at - begin for at in soaked["lost_at"]]
    in_flight = [at for at in lost if 0 <= at - events.kill <= AFTER_KILL]
    failures = sum(soaked["problems"].values()) - soaked["wrong"]
    with np.load(trace) as arrays:
        due, latency = arrays["due"] - begin, arrays["latency"] * 1000
    found = {
        "moves": events.moves,
        "kill": {"at": events.kill, "in_flight_lost": len(in_flight)},
        "wrong": soaked["wrong"],
        "failed_otherwise": failures - len(in_flight),
        "late": late_by_cause(due, latency, events),
        "memory": [
            {"pid": pid, **track, "growth_bytes": growth(track["bytes"])} for pid, track in events.memory.items()
        ],
        "timeline": {"due": due, "latency_ms": latency},
    }  # fmt: skip
    _show(soaked, found)
    return found


def late_by_cause(due: NDArray[np.float64], latency: NDArray[np.float64], events: Events) -> dict[str, Any]:
    """Count late answers after a move, after the kill, and else.

    Args:
        due: float64 [answers], seconds from the start of the load.
        latency: float64 [answers], milliseconds.
        events: what was done.
    """
    killed = (due > events.kill - 0.1) & (due < events.kill + 5 * AFTER_KILL) & (events.kill > 0)
    moved = np.zeros(len(due), np.bool_)
    for move in events.moves:
        moved |= (due > move["at"] - 0.1) & (due < move["at"] + AFTER_MOVE)
    parts = {"after the kill": killed, "after a move": moved & ~killed, "else": ~moved & ~killed}
    return {
        name: {"answers": int(part.sum())}
        | {f"> {limit} ms": int((latency[part] > limit).sum()) for limit in LATE_MS}
        for name, part in parts.items()
    }


def growth(sizes: Sequence[int]) -> int:
    """Return the bytes by which the last fifth of a track lies above the second fifth, by their medians."""
    fifth = max(1, len(sizes) // 5)
    return int(np.median(sizes[-fifth:]) - np.median(sizes[fifth : 2 * fifth] or sizes))


def _show(soaked: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Print what happened."""
    show_table("soak", ["", "value"], [
        ["answers", soaked["answers"]], ["requests/s", round(soaked["rate"])], ["wrong", found["wrong"]],
        ["lost in flight by the kill", found["kill"]["in_flight_lost"]],
        ["failed otherwise", found["failed_otherwise"]], ["problems", str(soaked["problems"])],
        ["builds seen", len(soaked["builds"])], ["moves", len(found["moves"])],
    ])  # fmt: skip
    late = [[name, *part.values()] for name, part in found["late"].items()]
    show_table("late answers", ["", "answers", *(f"> {limit} ms" for limit in LATE_MS)], late)
    show_table("resident anonymous memory", ["process", "pid", "first MB", "last MB", "growth MB"], [
        [each["role"], each["pid"], each["bytes"][0] / 1e6, each["bytes"][-1] / 1e6, each["growth_bytes"] / 1e6]
        for each in found["memory"]
    ])  # fmt: skip


def show_echo(figures: Mapping[str, Any]) -> None:
    """Print the service next to the echo."""
    rows = []
    for name in ("echo_before", "echo_beside", "soak"):
        load = figures[name]
        us = load["latency_us"]
        late = [f"{1e6 * count / us['samples']:,.0f}" for count in us["late"].values()]
        rows.append([name, round(load["rate"]), us["p50"], us["p99"], us["p99.9"], us["max"], *late])
    columns = ["", "requests/s", "p50 µs", "p99", "p99.9", "max"]
    show_table("late answers of a million", [*columns, *(f"> {limit} ms" for limit in LATE_MS)], rows)


def save_pictures(out: Path, figures: Mapping[str, Any]) -> None:
    """Draw memory and late answers over time."""
    show_echo(figures)
    figure, axes = new_axes("resident anonymous memory", "seconds", "MB")
    for track in figures["memory"]:
        axes.plot(track["at"], np.array(track["bytes"]) / 1e6, label=f"{track['role']} {track['pid']}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small")
    _mark(axes, figures)
    figure.savefig(out / "soak_memory.png", dpi=150)
    due, latency = figures["timeline"]["due"], figures["timeline"]["latency_ms"]
    figure, axes = new_axes("latency from when a request was due", "seconds", "ms")
    for name, values in _by_second(due, latency):
        axes.plot(range(len(values)), values, label=name, linewidth=1)
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize="small")
    _mark(axes, figures)
    figure.savefig(out / "soak_latency.png", dpi=150)


def _by_second(due: NDArray[np.float64], latency: NDArray[np.float64]) -> Iterator[tuple[str, list[float]]]:
    """Yield percentiles of the latency by second."""
    order = np.argsort(due)
    stops = np.searchsorted(due[order], np.arange(1, int(due.max()) + 1))
    seconds = [part for part in np.split(latency[order], stops) if len(part)]
    for percent in (50, 99, 100):
        name = "max" if percent == 100 else f"p{percent}"
        yield name, [float(np.percentile(part, percent)) for part in seconds]


def _mark(axes: Any, figures: Mapping[str, Any]) -> None:
    """Draw a line where a release moved or a worker was killed."""
    for move in figures["moves"]:
        axes.axvline(move["at"], color="#cccccc", linewidth=0.8)
    if figures["kill"]["at"] > 0:
        axes.axvline(figures["kill"]["at"], color="#b3541e", linewidth=1.2)


if __name__ == "__main__":
    main()
