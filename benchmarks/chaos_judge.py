"""What a soak has shown: what was wrong, what was refused without a cause, how long nobody answered, and memory."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.chaos_clients import Away, Client
from benchmarks.chaos_faults import DATABASE, DISK, Event, Faults
from benchmarks.chaos_flows import Run
from benchmarks.report import show_table
from benchmarks.soak import growth

FRAMES = "drafts in frames"
TAKES_DOWN: dict[str, dict[str, float]] = {
    FRAMES: {"lookup supervisor": 60.0},
    "drafts in JSON": {"lookup supervisor": 60.0, "lookup web": 30.0, "lookup worker": 3.0},
    "completions": {"decoding worker": 180.0},
}
"""Kills after which a client may get no answer, and for how many seconds: the time of a start on a busy machine."""
IN_FLIGHT = ("lookup worker", "lookup supervisor")
"""Kills that lose the frames that were under way."""
BEFORE_SECONDS = 3.0
"""Time in which a client notices that a process was killed."""
GAP_SECONDS = 0.5
"""Time without a draft that counts as nobody answering."""
SPOILS = (
    "flow",
    "prefect worker",
    "prefect server",
    "prefect supervisor",
    "postgres",
    "database supervisor",
    DATABASE,
    DISK,
)
"""What a flow may fail of."""


def judge(
    loaded: Mapping[str, Any], arrivals: NDArray[np.float64], clients: Sequence[Client], faults: Faults,
    runs: Sequence[Run], memory: Mapping[str, Sequence[tuple[float, int]]],
) -> dict[str, Any]:  # fmt: skip
    """Return the figures.

    Args:
        loaded: figures of the load generator.
        arrivals: float64 [answers], when drafts came, sorted.
        clients: those over HTTP.
        faults: what was done.
        runs: flow runs.
        memory: of each role over time, in seconds and bytes.
    """
    events = faults.events
    zero = loaded["begin"]
    lost = [at for at in loaded["lost_at"] if not cause(at, at, IN_FLIGHT, events)]
    refused = [
        [round(at - zero, 1), what] for at, what in loaded["failed_at"] if not what.startswith("wrong")
    ]
    away = [(FRAMES, each) for each in gaps(arrivals)]
    away += [(client.name, each) for client in clients for each in client.away]
    spoiled = [run for run in runs if run.state != "COMPLETED"]
    return {
        "answers": {FRAMES: loaded["answers"]} | {client.name: client.answers for client in clients},
        "wrong": {FRAMES: loaded["wrong"]} | {client.name: len(client.wrong) for client in clients},
        "wrong_examples": [wrong for client in clients for wrong in client.wrong[:5]],
        "problems": loaded["problems"],
        "builds_seen": len(loaded["builds"]),
        "wrongly_refused": {
            "frames": refused, "frames_lost_without_a_kill": [round(at - zero, 1) for at in lost],
            **{name: [_told(each, zero) for of, each in away if of == name and not cause_of(name, each, events)]
               for name in TAKES_DOWN if name != FRAMES},
        },
        "away": {name: _away([each for of, each in away if of == name], name, events) for name in TAKES_DOWN},
        "flows": {
            "ended": dict(Counter(run.state for run in runs)),
            "seconds": round(float(np.median([run.end - run.begin for run in runs])), 1) if runs else None,
            "failed_without_a_cause": [
                _told(Away(run.begin, run.end, f"{run.state}: {run.message}"), zero)
                for run in spoiled if not cause(run.begin, run.end, SPOILS, events)
            ],
            "failed": [_told(Away(run.begin, run.end, f"{run.state}: {run.message}"), zero) for run in spoiled],
        },
        "kills": dict(Counter(event.what for event in events if event.begin == event.end)),
        "not_done": faults.left,
        "events": [
            {"what": event.what, "begin": round(event.begin - zero, 1), "end": round(event.end - zero, 1),
             "said": event.said} for event in events
        ],
        "memory": {role: _track(values) for role, values in memory.items()},
    }  # fmt: skip


def gaps(arrivals: NDArray[np.float64]) -> list[Away]:
    """Return when no draft came for long."""
    return [
        Away(float(arrivals[place]), float(arrivals[place + 1]), "no answer")
        for place in np.flatnonzero(np.diff(arrivals) > GAP_SECONDS)
    ]


def cause(begin: float, end: float, whats: Iterable[str], events: Iterable[Event]) -> str:
    """Return the first that was done shortly before or meanwhile and may have brought it about; empty if none was."""
    done = {event.what for event in events if event.begin <= end and event.end >= begin - BEFORE_SECONDS}
    return next((what for what in whats if what in done), "")


def cause_of(name: str, away: Away, events: Iterable[Event]) -> str:
    """Return the kill that kept a client from its answers."""
    whats = [what for what, most in TAKES_DOWN[name].items() if away.end - away.begin <= most]
    return cause(away.begin, away.end, whats, events)


def _away(aways: Sequence[Away], name: str, events: Sequence[Event]) -> dict[str, Any]:
    """Sum up the time without an answer by its cause."""
    found: dict[str, Any] = {}
    for each in aways:
        figures = found.setdefault(
            cause_of(name, each, events) or "without a cause", {"times": 0, "seconds": 0.0, "longest": 0.0}
        )
        seconds = each.end - each.begin
        figures["times"] += 1
        figures["seconds"] = round(figures["seconds"] + seconds, 1)
        figures["longest"] = round(max(figures["longest"], seconds), 1)
    return found


def _told(away: Away, zero: float) -> list[Any]:
    return [round(away.begin - zero, 1), round(away.end - zero, 1), away.what]


def _track(values: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Return a track of memory with its growth."""
    at, sizes = [second for second, _ in values], [size for _, size in values]
    return {
        "at": at, "bytes": sizes, "first": sizes[0], "most": max(sizes), "last": sizes[-1],
        "growth_bytes": growth(sizes),
    }  # fmt: skip


def show(figures: Mapping[str, Any]) -> None:
    """Print the tables."""
    wrongly = figures["wrongly_refused"]
    show_table("answers", ["", "right", "wrong", "refused or lost without a kill"], [
        [name, figures["answers"][name], figures["wrong"][name],
         len(wrongly["frames"]) + len(wrongly["frames_lost_without_a_kill"]) if name == FRAMES else len(wrongly[name])]
        for name in TAKES_DOWN
    ])  # fmt: skip
    show_table("time without an answer", ["asked for", "after a kill of", "times", "seconds", "longest"], [
        [name, why, each["times"], each["seconds"], each["longest"]]
        for name, whys in figures["away"].items() for why, each in whys.items()
    ])  # fmt: skip
    show_table(
        "what was done", ["", "times"], list(Counter(each["what"] for each in figures["events"]).items())
    )
    flows = figures["flows"]
    show_table("flows", ["ended as", "runs"], [*flows["ended"].items(), ["last one", figures["last_run"]]])
    for title, lines in (
        ("failed without a cause", flows["failed_without_a_cause"]), ("wrongly refused", wrongly.items()),
        ("left over", figures["orphans"].items()), ("problems", figures["problems"].items()),
        ("planned, not done", figures["not_done"]),
    ):  # fmt: skip
        print(f"{title}:", *(f"  {line}" for line in lines), sep="\n")
    show_table("resident anonymous memory", ["role", "first MB", "most MB", "last MB", "growth MB"], [
        [role, *(track[name] / 1e6 for name in ("first", "most", "last", "growth_bytes"))]
        for role, track in figures["memory"].items()
    ])  # fmt: skip
