"""Node budgets by cost: `python -m benchmarks.budget`.

Recorded outputs are replayed with 64-node drafts, and every pass takes as long as a cost curve says. Compared are fixed
budgets, the planner of `draftstore.decoding.budget`, the best fixed budget of each text in hindsight, and an oracle
that knows what will be accepted and chooses the fastest way through each text. Speedups are over plain decoding, all
texts together; beside them, for the planner, the share of slow texts, below 0.97 of plain speed, among those of 50
tokens and more, the slowest of these, and nodes a pass.

Three sets are made worse on purpose: drafts that are never right, that promise too much (the square root of the real
probabilities and less), and too little (their square). Tables first; the last line of stdout is one JSON document, also
written to OUT/budget.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.budget --work ~/bench
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.common import (
    CHAT,
    CODE,
    RecordingSet,
    Source,
    Workspace,
    add_arguments,
    evenly,
    open_workspace,
)
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.budget import CostCurve, CostPlanner
from draftstore.decoding.loop import Fixed, Planner, decode
from draftstore.decoding.replay import RecordedTarget, Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.stores.rest.store import RestStore
from draftstore.trees.tree import LOWEST_LEVEL, DraftTree

BUDGET = 64
FIXED = (0, 4, 8, 16, 32, 64)
HINDSIGHT = (0, 1, 2, 4, 8, 16, 32, 64)
SLOW, LONG = 0.97, 50
ROWS, QUICK_ROWS = 80, 6

CURVES = {
    "CPU, 135M": CostCurve(
        (1, 2, 4, 8, 16, 32, 64, 128), (0.041, 0.062, 0.062, 0.074, 0.090, 0.115, 0.176, 0.287)
    ),
    "H200, 8B roofline": CostCurve((1, 16, 32, 64, 128), (0.0070, 0.0077, 0.0084, 0.0098, 0.0126)),
    "H200, 8B, CUDA graphs": CostCurve(
        (1, 2, 4, 8, 16, 32, 64, 128),
        (0.0070, 0.00705, 0.00714, 0.00733, 0.0077, 0.0084, 0.0098, 0.0126),
        padded=True,
    ),
}
"""The first: SmolLM2-135M in float32 on two cores. The others: an upper bound of what verification takes on an H200."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Recorded outputs and what they are drafted from.

    Attributes:
        name: for the table.
        recorded: the outputs.
        store: what the store is built from.
        request: whether the prompt and the output so far are drafted from too.
        spoil: what is done to every draft.
    """

    name: str
    recorded: RecordingSet
    store: Source
    request: bool = True
    spoil: Callable[[DraftTree], DraftTree] = lambda tree: tree


def never_right(tree: DraftTree) -> DraftTree:
    """Return a draft of tokens that no text holds."""
    return DraftTree(tree.tokens + 1_000_000, tree.parents, tree.levels)


def power(exponent: float) -> Callable[[DraftTree], DraftTree]:
    """Return what raises every probability to a power; nodes that fall below the grid are dropped."""

    def raised(tree: DraftTree) -> DraftTree:
        levels = np.round(tree.levels * exponent)
        kept = tree.prefix(int(np.count_nonzero(levels <= LOWEST_LEVEL)))
        return DraftTree(kept.tokens, kept.parents, levels[: len(kept)].astype(np.uint8))

    return raised


ALPACA = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
CASES = (
    Case("chat", ALPACA, CHAT),
    Case("chat, store alone", ALPACA, CHAT, request=False),
    Case("short answers", RecordingSet("spec_bench.jsonl.zst", "vicuna-7b-v1.3"), CHAT),
    Case("code", RecordingSet("humaneval.jsonl.zst", "CodeLlama-7b-Instruct-hf"), CODE),
    Case(
        "chat, store of code alone",
        RecordingSet("alpaca_eval.jsonl.zst", "llama-2-7b-chat-hf"),
        CODE,
        request=False,
    ),
    Case("never right", ALPACA, CHAT, spoil=never_right),
    Case("promises too much", ALPACA, CHAT, spoil=power(0.4)),
    Case("promises too little", ALPACA, CHAT, spoil=power(2.0)),
)


class Trace:
    """The drafts at every place of an output, a session that proposes them again."""

    needs_candidates = False
    needs_hidden = False

    def __init__(
        self, recording: Recording, drafter: Drafter, spoil: Callable[[DraftTree], DraftTree]
    ) -> None:
        """Ask a drafter before every token but the first."""
        self.output = recording.output
        self.trees: list[DraftTree] = []
        session = drafter.session(np.concatenate([recording.prompt, self.output[:1]]))
        for place in range(1, len(self.output)):
            tree = session.propose(BUDGET)
            self.trees.append(spoil(tree))
            session.observe(self.output[place : place + 1], tree=DraftTree.empty())
        self._place = 0

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:  # noqa: ARG002
        """Return the draft of the present place."""
        return self.trees[self._place].prefix(budget)

    def observe(self, accepted_ids: ArrayLike, **_rest: Any) -> None:
        """Go on."""
        self._place += len(np.asarray(accepted_ids))

    def passes(self, planner: Planner) -> list[int]:
        """Return the nodes that each pass verifies."""
        self._place = 0
        target = RecordedTarget(self.output)
        return [len(step.tree) for step in decode(target, self, planner=planner, ends=target.ends)]


def oracle(trace: Trace, costs: Sequence[float]) -> float:
    """Return the least seconds that any choice of prefixes takes.

    Args:
        trace: of the output.
        costs: of passes over 0 nodes, 1 node, ...
    """
    places = len(trace.trees)
    least = np.zeros(places + 1)
    for place in reversed(range(places)):
        ahead = trace.output[place + 1 : place + 1 + BUDGET]
        path = trace.trees[place].accepted(ahead[: places - place - 1])
        ways = [costs[0] + least[place + 1]]
        ways += [costs[node + 1] + least[place + 2 + i] for i, node in enumerate(path)]
        least[place] = min(ways)
    return float(least[0])


def summarize(seconds: Sequence[float], plain: Sequence[float], tokens: Sequence[int]) -> dict[str, float]:
    """Return the speedup of all texts together, and what it is in the slowest ones."""
    each = np.array(plain) / np.array(seconds)
    long = each[np.array(tokens) >= LONG]
    return {
        "speedup": round(sum(plain) / sum(seconds), 4),
        "share_below_0.97": round(float((each < SLOW).mean()), 4),
        "slowest": round(float(each.min()), 4),
        f"share_below_0.97_of_{LONG}_tokens": round(float((long < SLOW).mean()), 4),
        f"slowest_of_{LONG}_tokens": round(float(long.min()), 4),
    }


def run_case(case: Case, workspace: Workspace, store: RestStore, rows: int) -> list[dict[str, Any]]:
    """Replay one case with every policy over every curve."""
    drafter: Drafter = store.drafter()
    if case.request:
        drafter = Mixture([drafter, RequestDrafter(store.manifest.vocab_size)])
    recordings = [row for row in evenly(workspace.recordings(case.recorded), rows) if len(row.output) > 1]
    traces = [Trace(recording, drafter, case.spoil) for recording in recordings]
    fixed = {budget: [trace.passes(Fixed(budget)) for trace in traces] for budget in HINDSIGHT}
    results = []
    for name, curve in CURVES.items():
        costs = [curve.cost(nodes + 1) for nodes in range(BUDGET + 1)]
        tokens = [len(trace.trees) for trace in traces]
        plain = [costs[0] * count for count in tokens]

        def timed(passes: Sequence[Sequence[int]], costs: list[float] = costs) -> list[float]:
            return [sum(costs[nodes] for nodes in nodes_of) for nodes_of in passes]

        planned = [trace.passes(CostPlanner(curve, BUDGET)) for trace in traces]
        hindsight = np.min([timed(passes) for passes in fixed.values()], axis=0).tolist()
        policies = {f"fixed {budget}": summarize(timed(fixed[budget]), plain, tokens) for budget in FIXED}
        policies["planner"] = summarize(timed(planned), plain, tokens) | {
            "nodes_mean": round(float(np.mean([nodes for passes in planned for nodes in passes])), 2),
            "accepted_length": round(sum(tokens) / sum(len(passes) for passes in planned), 4),
        }
        policies["hindsight"] = summarize(hindsight, plain, tokens)
        policies["oracle"] = summarize([oracle(trace, costs) for trace in traces], plain, tokens)
        results.append({"case": case.name, "curve": name, "texts": len(traces), "policies": policies})
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table for each curve."""
    for curve in CURVES:
        of_curve = [result for result in results if result["curve"] == curve]
        columns = [
            "drafts",
            *(name.removeprefix("fixed ") for name in of_curve[0]["policies"]),
            "slow texts",
            "slowest",
            "nodes",
        ]
        table = []
        for result in of_curve:
            planner = result["policies"]["planner"]
            speedups = [f"{policy['speedup']:.3f}" for policy in result["policies"].values()]
            below = f"{planner[f'share_below_0.97_of_{LONG}_tokens']:.1%}"
            slowest = f"{planner[f'slowest_of_{LONG}_tokens']:.3f}"
            table.append([result["case"], *speedups, below, slowest, planner["nodes_mean"]])
        show_table(f"modelled speedup over plain decoding, {curve}", columns, table)


def main() -> None:
    """Run all cases and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    add_arguments(parser, code=True)
    parser.add_argument("--chat-store", type=Path, help="a REST store of the chats (default: built)")
    parser.add_argument("--code-store", type=Path, help="a REST store of the code (default: built)")
    args = parser.parse_args()
    cases = [case for case in CASES if case.store is CHAT] if args.quick else list(CASES)
    given = {CHAT: args.chat_store, CODE: args.code_store}
    results: list[dict[str, Any]] = []
    with open_workspace(args) as workspace:
        sources = dict.fromkeys(case.store for case in cases)
        stores = {
            source: RestStore.open(path) if (path := given[source]) else workspace.store(source)
            for source in sources
        }
        for case in cases:
            progress(case.name)
            rows = QUICK_ROWS if args.quick else ROWS
            results += run_case(case, workspace, stores[case.store], rows)
    show(results)
    curves = {
        name: {"rows": curve.rows, "seconds": curve.seconds, "padded": curve.padded}
        for name, curve in CURVES.items()
    }
    document = describe_machine() | {
        "quick": args.quick,
        "budget": BUDGET,
        "curves": curves,
        "results": results,
    }
    finish(args.out, "budget", document)


if __name__ == "__main__":
    main()
