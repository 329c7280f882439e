"""Drafts from earlier replies, in order of traffic, on recorded agent sessions: `python -m benchmarks.agents`.

Every reply is replayed with every system, in random order; systems with live memory then learn it. The store is the
corpus of the same agent, none of whose sessions is replayed. Systems are in systems.py; other libraries are included if
installed, see benchmarks/quality/libraries.py. Chat and code of `benchmarks.quality` are added for comparison, to show
live memory on traffic that does not repeat.

Results are accepted length M by set, system and nodes, and by kind of text (kinds.py), where a pass is divided equally
among its tokens. For live memory also M after so many sessions: each session is replayed with a memory of only those
before it (before the first, the last of the corpus) and of its own earlier replies. Drafts are timed on one core;
`ratio` is the median over replies of the median time with live memory, request and store, divided by that without live
memory, measured alternately.

Tables first; the last line of stdout is one JSON document, also written to OUT/agents.json. The picture, agents.svg,
is drawn in docs/ for a full run, otherwise in OUT.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.agents --work ~/bench --sets 'agent: tool calls' --nodes 16
"""

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, product
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.agents.kinds import KINDS, kinds_of
from benchmarks.agents.picture import draw_agents
from benchmarks.agents.systems import ALL, BEFORE, LIVE, SYSTEMS, installed
from benchmarks.common import (
    SEED,
    TOKENIZER,
    Notes,
    RecordingSet,
    Source,
    Workspace,
    add_arguments,
    chosen,
    open_workspace,
    write_records,
)
from benchmarks.measure import undisturbed
from benchmarks.quality.__main__ import DOCS, nested
from benchmarks.quality.reliability import steps_of
from benchmarks.quality.replays import REPLAYS
from benchmarks.quality.systems import System, Texts
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import Recording, read_recordings
from draftstore.text.records import read_json_records

NODES, QUICK_ROWS = (16, 64), 20
AFTER = (0, 1, 4, 16)
"""Numbers of sessions in a live memory before the replayed one."""

Cell = dict[str, Any]
"""Figures of one set for one number of nodes."""
Sessions = list[list[Recording]]


class Traffic(NamedTuple):
    """Recorded replies in order of traffic, stored texts, the tokenizer of both, the systems compared."""

    recorded: RecordingSet
    source: Source
    vocabulary: str = TOKENIZER
    systems: Sequence[str] = (ALL, BEFORE)


def _agent(name: str) -> Traffic:
    file = f"{name}.jsonl.zst"
    return Traffic(RecordingSet(file), Source(name, (file,)), "qwen2.5", tuple(SYSTEMS))


BESIDE = ("AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct")
SETS = {
    "agent: tool calls": _agent("agent_tools"),
    "agent: coding": _agent("agent_swe"),
    **{name: Traffic(REPLAYS[name].recorded, REPLAYS[name].source) for name in BESIDE},
}


class Played(NamedTuple):
    """A reply replayed with a system.

    Attributes:
        shares: float64 [n - 1], the pass of each token but the first, divided equally among the pass's tokens.
        times: float64 [passes], microseconds of each draft.
    """

    shares: NDArray[np.float64]
    times: NDArray[np.float64]


def play(system: System, recording: Recording, nodes: int) -> Played:
    """Replay a reply and have the system learn it."""
    steps = [step for step, _ in steps_of(system.drafter, recording, nodes)]
    system.learn(recording)
    shares = [np.full(len(step.tokens), 1 / len(step.tokens)) for step in steps]
    times = np.array([step.draft_ns for step in steps]) / 1000
    return Played(np.concatenate([np.empty(0), *shares]), times)


def in_turn(
    systems: Mapping[str, System], replies: Iterable[Recording], nodes: int
) -> dict[str, list[Played]]:
    """Replay every reply with every system."""
    rng, names = np.random.default_rng(SEED), list(systems)
    played: dict[str, list[Played]] = {name: [] for name in names}
    for recording in replies:
        for name in rng.permutation(names).tolist():
            played[name].append(play(systems[name], recording, nodes))
    return played


def length_of(replies: Sequence[Played], places: Any = slice(None)) -> float:
    """Return the accepted length of replies, or of a subset of their tokens."""
    shares = np.concatenate([reply.shares for reply in replies])[places]
    return round(len(shares) / float(shares.sum()), 4)


def measure(workspace: Workspace, name: str, nodes: int, systems: Sequence[str], rows: int | None) -> Cell:
    """Replay a set with systems for drafts of so many nodes."""
    traffic = SETS[name]
    workspace = dataclasses.replace(workspace, vocabulary=traffic.vocabulary)
    texts, replies = Texts(workspace, traffic.source), workspace.recordings(traffic.recorded)[:rows]
    made = {system: SYSTEMS[system](texts, nodes) for system in systems}
    for system in made.values():
        system.drafter.session(np.array([1, 2])).propose(nodes)  # compiles what it needs
    with undisturbed():
        played = in_turn(made, replies, nodes)
        cell = summarize(played)
        if LIVE in made:
            kinds = np.concatenate([kinds_of(reply.output, workspace.tokenizer)[1:] for reply in replies])
            cell |= by_kind(played, kinds)
            earlier = stored_sessions(workspace, traffic.source)
            cell["sessions"] = by_sessions(made[LIVE], earlier, sessions_of(replies), nodes)
    return cell


def summarize(played: Mapping[str, Sequence[Played]]) -> Cell:
    """Return accepted lengths by system, and the ratio of draft times with and without live memory."""
    pairs = zip(played[ALL], played[BEFORE], strict=True)
    ratios = [np.median(after.times) / np.median(before.times) for after, before in pairs if len(after.times)]
    return {
        "accepted_length": {name: length_of(replies) for name, replies in played.items()},
        "ratio": round(float(np.median(ratios)), 3),
    }


def by_kind(played: Mapping[str, Sequence[Played]], kinds: NDArray[np.int8]) -> Cell:
    """Return the share of each kind in the tokens, and accepted lengths by system and kind."""
    places = {name: kinds == place for place, name in enumerate(KINDS) if (kinds == place).any()}
    return {
        "share": {kind: round(float(place.mean()), 3) for kind, place in places.items()},
        "kinds": {
            name: {kind: length_of(replies, place) for kind, place in places.items()}
            for name, replies in played.items()
        },
    }


def by_sessions(live: System, earlier: Sessions, own: Sessions, nodes: int) -> dict[str, float]:
    """Return accepted lengths with a live memory of so many sessions and the current one."""
    timeline, found = [*earlier, *own], {}
    for after in AFTER:
        played = list[Played]()
        for place, session in enumerate(own, len(earlier)):
            live.forget()
            for recording in chain.from_iterable(timeline[place - after : place]):
                live.learn(recording)
            played += [play(live, recording, nodes) for recording in session]
        found[str(after)] = length_of(played)
    return found


def sessions_of(replies: Iterable[Recording]) -> Sessions:
    """Return replies by session, named in their ids before a `#`."""
    return [list(session) for _, session in groupby(replies, lambda reply: reply.id.split("#")[0])]


def stored_sessions(workspace: Workspace, source: Source) -> Sessions:
    """Return the replies of the last sessions of a corpus."""
    path = workspace.work / "corpora" / f"{source.name}_replies.jsonl"
    (file,) = workspace.inputs(source)
    replies = [
        {
            "id": f"{session['id']}#{place}",
            "prompt": session["messages"][:place],
            "output": message["content"],
        }
        for session in [record for _, record in read_json_records(file)][-max(AFTER) :]
        for place, message in enumerate(session["messages"])
        if message["role"] == "assistant"
    ]
    write_records(path, replies)
    return sessions_of(read_recordings(path, workspace.tokenizer))


def show(figures: Mapping[str, Any]) -> None:
    """Print accepted lengths and times by set and nodes."""
    for name, by_nodes in figures["accepted_length"].items():
        for nodes, lengths in by_nodes.items():
            kinds, after = (figures[key].get(name, {}).get(nodes, {}) for key in ("kinds", "sessions"))
            ratio = figures["ratio"][name][nodes]
            title = f"{name}, {nodes} nodes; a draft takes {ratio} with live; {LIVE} after sessions: {after}"
            rows = [[system, length, *kinds.get(system, {}).values()] for system, length in lengths.items()]
            show_table(title, ["drafts", "M", *kinds.get(ALL, {})], rows)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--sets", help=f"some of {', '.join(SETS)} (default: all)")
    parser.add_argument("--nodes", help=f"default: {','.join(map(str, NODES))}")
    args = parser.parse_args(arguments)
    args.systems = installed()
    args.whole = not (args.quick or args.sets or args.nodes) and len(args.systems) == len(SYSTEMS)
    args.sets = chosen(parser, args.sets or ("agent: tool calls" if args.quick else None), SETS)
    args.nodes = [int(each) for each in args.nodes.split(",")] if args.nodes else list(NODES)
    args.rows = QUICK_ROWS if args.quick else None
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure missing figures, print tables, draw, and finish with the JSON document."""
    args = parse_arguments(arguments)
    cells = list[Cell]()
    with open_workspace(args) as workspace:
        notes = Notes(workspace.work / "agents")
        for name, nodes in product(args.sets, args.nodes):
            systems = [system for system in SETS[name].systems if system in args.systems]
            place = {"name": name, "nodes": nodes, "systems": systems, "rows": args.rows}
            cells.append(notes.take(place, partial(measure, workspace, **place)))
    keys = ("accepted_length", "kinds", "share", "sessions", "ratio")
    places = "name", "nodes"
    figures = {key: nested([each for each in cells if key in each], places, itemgetter(key)) for key in keys}
    show(figures)
    draw_agents((DOCS if args.whole else args.out) / "agents.svg", figures["accepted_length"])
    about = describe_machine(["arctic-inference", "sglang"]) | {"rows": args.rows}
    finish(args.out, "agents", about | figures)


if __name__ == "__main__":
    main()
