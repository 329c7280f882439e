"""Drafts from earlier rollouts of the same prompts, epoch by epoch: `python -m benchmarks.rollouts`.

The answers of policies that were tuned from one base stand in for the rollouts of reinforcement learning: the same
prompts, answered again by a slightly other policy. Outputs are replayed in order of the file, and learned when they
end. By epoch, for drafts of so many nodes, tokens a pass:

request                   the text itself
recall                    and the latest answers to the same prompt
live                      and live memory of all answers to all prompts, with its rule for memory alone
live and recall           both
last epoch, a chain       specRL's rule: the last answer to the same prompt alone, a chain of 16 tokens
arctic-inference          its suffix cache, if it is installed (benchmarks/quality/libraries.py)

Then the time until the last of a batch of 64 texts has ended (`benchmarks.rollouts.makespan`), for the passes of an
H200 and for those of --curve. Further parts:

once     outputs of agents, and answers of AlpacaEval, whose prompts come once: live memory with and without recall
steps    what recall costs (`benchmarks.rollouts.steps`)
real     one real run of a small model (`benchmarks.rollouts.real`)

Tables first; the last line of stdout is one JSON document by part, each also written to OUT/rollouts.json or
OUT/rollouts_PART.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.rollouts --work ~/bench
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.rollouts --nodes 16 --prompts 403
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.rollouts --work ~/bench --parts real
"""

import argparse
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import Documents, Notes, Workspace, add_arguments, chosen, evenly, open_workspace
from benchmarks.measure import undisturbed
from benchmarks.quality.libraries import Arctic
from benchmarks.quality.systems import absent
from benchmarks.report import describe_machine, save, show_rows
from benchmarks.rollouts.makespan import BATCH, WAYS, gpu_curve, makespan
from benchmarks.rollouts.real import measure_real
from benchmarks.rollouts.steps import measure_first, measure_steps
from benchmarks.smollm import add_model_argument
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.replay import Recording, record_turn, replay, turns_of
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.live.directory import ANSWERS
from draftstore.live.recall import RecallDrafter
from draftstore.live.shared import Vocabulary
from draftstore.live.store import LiveStore
from draftstore.text.records import read_json_records

SETS = ("rollouts_llama3", "rollouts_mistral")
ONCE, FEW = ("agent_swe", "agent_tools", "alpaca_eval"), 16
"""Sets whose prompts come once, and the nodes of their drafts."""
NODES, QUICK_NODES = (4, 16, 64), (16,)
PROMPTS, QUICK_PROMPTS = 60, 6
ROUNDS = 5
MEMORY_TOKENS = 4_000_000
BOTH, LAST = "live and recall", "last epoch, a chain"


class Rollout(NamedTuple):
    """A recorded output with its epoch and prompt."""

    epoch: int
    prompt: str
    recording: Recording


def read_rollouts(workspace: Workspace, name: str, prompts: int) -> list[Rollout]:
    """Return the outputs for some prompts, in order of the file; of sets whose prompts come once, the first."""
    path = workspace.data / "replays" / f"{name}.jsonl.zst"
    records = [
        (place, record.get("epoch", 0), record.get("prompt_id", place), record)
        for place, record in read_json_records(path)
    ]
    known = [*dict.fromkeys(prompt for _, _, prompt, _ in records)]
    wanted = {*(known[:prompts] if name in ONCE else evenly(known, prompts))}
    return [
        Rollout(epoch, prompt, record_turn(turn, workspace.tokenizer))
        for place, epoch, prompt, record in records
        if prompt in wanted
        for turn in turns_of(record, place)
    ]


def _ours(sources: Sequence[str], vocab_size: int) -> tuple[Drafter, Callable[[Rollout], None]]:
    """Return a drafter of sources, and what it learns from an output."""
    store = LiveStore(MEMORY_TOKENS)
    store.agree(Vocabulary(vocab_size, "0" * 64))
    made: dict[str, Callable[[], Drafter]] = {
        "request": lambda: RequestDrafter(vocab_size),
        "live": lambda: store.drafter("sole"),
        "recall": lambda: RecallDrafter(store, vocab_size, ANSWERS),
        "last": lambda: RecallDrafter(store, vocab_size, 1),
    }

    def learn(rollout: Rollout) -> None:
        store.append_many(rollout.recording.prompt, [rollout.recording.output], rollout.epoch + 1)

    return Mixture([made[source]() for source in sources]), learn


def _arctic(_vocab_size: int) -> tuple[Drafter, Callable[[Rollout], None]]:
    return Arctic(Documents(np.empty(0, np.int32), np.zeros(1, np.int64), 0)), lambda _: None


SYSTEMS: dict[str, Callable[[int], tuple[Drafter, Callable[[Rollout], None]]]] = {
    "request": partial(_ours, ("request",)),
    "recall": partial(_ours, ("request", "recall")),
    "live": partial(_ours, ("request", "live")),
    BOTH: partial(_ours, ("request", "live", "recall")),
    LAST: partial(_ours, ("last",)),
    "arctic-inference": _arctic,
}


def measure(workspace: Workspace, name: str, nodes: int, system: str, prompts: int) -> dict[str, Any]:
    """Replay a set; return the accepted length by epoch, microseconds of a draft, and counts of each output."""
    drafter, learn = SYSTEMS[system](workspace.tokenizer.vocab_size)
    drafter.session(np.array([1, 2])).propose(nodes)  # compiles what it needs
    counts, times = defaultdict[int, list[tuple[int, int]]](list), list[float]()
    with undisturbed():
        for rollout in read_rollouts(workspace, name, prompts):
            played = replay(drafter, [rollout.recording], budget=nodes, chain=16 if system == LAST else None)
            counts[rollout.epoch].append((played.tokens, played.passes))
            times += played.lookup_ns
            learn(rollout)
    sums = {epoch: np.array(each).sum(axis=0) for epoch, each in counts.items()}
    return {
        "lengths": [round(float(tokens / passes), 4) for tokens, passes in sums.values()],
        "draft_us": round(float(np.median(times)) / 1000, 1),
        "counts": [*counts.values()],
    }


def by_batch(cells: Sequence[dict[str, Any]], curves: Mapping[str, CostCurve]) -> list[dict[str, Any]]:
    """Return the makespan of a batch by set, device and way, relative to decoding without drafts."""
    rows = []
    for name, (device, curve) in product(dict.fromkeys(each["name"] for each in cells), curves.items()):
        counts = {
            each["nodes"]: each["counts"] for each in cells if (each["name"], each["system"]) == (name, BOTH)
        }
        for epoch in range(1, len(next(iter(counts.values())))):
            texts = {nodes: np.array(each[epoch][:BATCH], float) for nodes, each in counts.items()}
            seconds = {way: makespan(texts, curve, way) for way in WAYS}
            faster = {way: round(seconds[WAYS[0]] / each, 3) for way, each in seconds.items()}
            rows.append(
                {"set": name, "device": device, "epoch": epoch, "texts": len(texts[max(texts)])} | faster
            )
    return rows


def measure_epochs(workspace: Workspace, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a pass by epoch, and the times of batches."""
    missing, nodes = absent(), [int(each) for each in args.nodes.split(",")]
    systems = [system for system in SYSTEMS if system not in missing]
    cells = _replays(workspace, args.prompts, product(SETS, nodes, systems))
    curves = {"H200, 8B": gpu_curve()} | ({args.curve.stem: CostCurve.load(args.curve)} if args.curve else {})
    batches = by_batch(cells, curves)
    for name, count in product(SETS, nodes):
        found = [each for each in cells if (each["name"], each["nodes"]) == (name, count)]
        rows = [
            {"drafts from": each["system"], "µs": each["draft_us"]}
            | {f"epoch {epoch}": length for epoch, length in enumerate(each["lengths"])}
            for each in found
        ]
        show_rows(f"{name}, {count} nodes: tokens a pass", rows)
    show_rows("a batch of rollouts: times as fast as without drafts, until the last text has ended", batches)
    return {"prompts": args.prompts, "lengths": _without_counts(cells), "batches": batches}


def measure_once(workspace: Workspace, args: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a pass for prompts that come once."""
    cells = _without_counts(_replays(workspace, args.prompts, product(ONCE, (FEW,), ("live", BOTH))))
    show_rows(
        "prompts that come once: tokens a pass", [each | {"lengths": each["lengths"][0]} for each in cells]
    )
    return {"outputs": args.prompts, "lengths": cells}


def measure_costs(workspace: Workspace, args: argparse.Namespace) -> dict[str, Any]:
    """Return what recall costs."""
    rollouts, size = read_rollouts(workspace, SETS[0], PROMPTS), workspace.tokenizer.vocab_size
    earlier, last = (
        [each.recording for each in rollouts if (each.epoch == rollouts[-1].epoch) == ended]
        for ended in (False, True)
    )
    with undisturbed():
        steps, first = (
            measure_steps(earlier, last, size, 1 if args.quick else ROUNDS),
            measure_first(earlier, size),
        )
    show_rows("256 texts of 16 prompts with six answers each, 16 nodes: milliseconds of one core, MiB", steps)
    show_rows("the first draft of a prompt: milliseconds of one core", [first])
    return {"steps": steps, "first": first}


def measure_run(workspace: Workspace, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a real run."""
    rows = measure_real(workspace, args.model, args.quick)
    show_rows("SmolLM2-135M-Instruct, 24 prompts x 4 answers of at most 64 tokens", rows)
    return {"rows": rows}


def _replays(
    workspace: Workspace, prompts: int, wanted: Iterable[tuple[str, int, str]]
) -> list[dict[str, Any]]:
    notes = Notes(workspace.work / "rollouts")
    places = [
        {"name": name, "nodes": nodes, "system": system, "prompts": prompts} for name, nodes, system in wanted
    ]
    return [notes.take(place, partial(measure, workspace, **place)) for place in places]  # type: ignore[arg-type]


def _without_counts(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: each[key] for key in each if key != "counts"} for each in cells]


PARTS: dict[str, Callable[[Workspace, argparse.Namespace], dict[str, Any]]] = {
    "epochs": measure_epochs,
    "once": measure_once,
    "steps": measure_costs,
    "real": measure_run,
}


def main() -> None:
    """Measure parts, print tables, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__)
    add_arguments(parser)
    add_model_argument(parser)
    parser.add_argument("--parts", help=f"any of {','.join(PARTS)} (default: all)")
    parser.add_argument("--nodes", help=f"default: {','.join(map(str, NODES))}")
    parser.add_argument(
        "--curve", type=Path, help="costs of passes on another device, from `draftstore tune`"
    )
    parser.add_argument("--prompts", type=int, help=f"prompts of each set (default: {PROMPTS})")
    args = parser.parse_args()
    args.nodes = args.nodes or ",".join(map(str, QUICK_NODES if args.quick else NODES))
    args.prompts = args.prompts or (QUICK_PROMPTS if args.quick else PROMPTS)
    done = {}
    with open_workspace(args) as workspace:
        workspace = dataclasses.replace(workspace, vocabulary="qwen2.5")
        for part in chosen(parser, args.parts, PARTS):
            figures = PARTS[part](workspace, args) | {"load_average": os.getloadavg()[0]}
            done[part] = describe_machine(["arctic-inference", "torch", "transformers"]) | figures
            save(args.out, "rollouts" if part == "epochs" else f"rollouts_{part}", done[part])
    print(json.dumps(done))


if __name__ == "__main__":
    main()
