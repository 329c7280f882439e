"""Token Recycling measured: cold and hot start, prompts in order and shuffled, static trees of 20 to 128 nodes.

Prompts of all kinds of text are decoded with the paper's tree of 80 nodes, all of it verified at every pass: that gives
the tokens a pass, which do not depend on this machine. Tokens per second are those of the same run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import SEED
from benchmarks.decode_runs import Outcome, Way, run_one
from benchmarks.decode_texts import Text
from benchmarks.report import show_table
from draftstore.cli.common import count_progress
from draftstore.decoding.budget import CostCurve, CostPlanner
from draftstore.decoding.loop import Fixed, Planner
from draftstore.drafting.rank_tree import RankTree
from draftstore.drafting.recycling import RecyclingDrafter
from draftstore.hf.loading import LoadedModel
from draftstore.stores.rest.store import BUDGET

NODES = (20, 40, 60, 80, 100, 128)
TREE = 80
Prompts = Sequence[NDArray[np.int32]]


def measure_recycling(
    loaded: LoadedModel, texts: Sequence[Text], curve: CostCurve, tokens: int
) -> dict[str, Any]:
    """Measure Token Recycling on some prompts of every text; the others are what a hot matrix has seen before."""
    measured = [prompt for text in texts for prompt in text.prompts[: (len(text.prompts) + 1) // 2]]
    earlier = [prompt for text in texts for prompt in text.prompts[(len(text.prompts) + 1) // 2 :]]
    order = np.random.default_rng(SEED).permutation(len(measured))
    runs = 7 + len(NODES)
    with count_progress("answers") as bars:
        task = bars.add_task("Token Recycling", total=runs * len(measured) + len(earlier), detail="")

        def decode(
            prompts: Prompts, planner: Planner | None, drafter: Callable[[], RecyclingDrafter] | None
        ) -> Any:
            outcomes = []
            for prompt in prompts:
                way = Way("", drafter, planner)
                outcomes.append(run_one(loaded.model, way, drafter() if drafter else None, prompt, tokens))
                bars.advance(task)
            return _figures(outcomes)

        def fresh(nodes: int = TREE) -> RecyclingDrafter:
            return RecyclingDrafter(loaded.vocab_size, tree=RankTree().resized(nodes))

        def hot(nodes: int = TREE) -> RecyclingDrafter:
            """Return a drafter that has seen the earlier prompts."""
            matrix, tree = seen.snapshot()
            return RecyclingDrafter(loaded.vocab_size, matrix=matrix, tree=tree.resized(nodes))

        def one(drafter: RecyclingDrafter) -> Callable[[], RecyclingDrafter]:
            return lambda: drafter

        seen = fresh()
        decode(earlier, Fixed(BUDGET), one(seen))
        whole, planned = Fixed(TREE), CostPlanner(curve, TREE)
        shuffled = [measured[place] for place in order]
        starts = {
            "no drafts": decode(measured, None, None),
            "cold, every prompt": decode(measured, whole, fresh),
            "one matrix, in order": decode(measured, whole, one(fresh())),
            "one matrix, shuffled": decode(shuffled, whole, one(fresh())),
            "hot": decode(measured, whole, one(hot())),
            "hot, shuffled": decode(shuffled, whole, one(hot())),
            "hot, planned by cost": decode(measured, planned, one(hot())),
        }
        trees = {str(nodes): decode(measured, Fixed(nodes), one(hot(nodes))) for nodes in NODES}
    return {
        "prompts": len(measured),
        "earlier": len(earlier),
        "most_tokens": tokens,
        "starts": starts,
        "trees": trees,
    }


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    passes = sum(outcome.tally.passes for outcome in outcomes)
    made = sum(outcome.tally.tokens for outcome in outcomes)
    written = sum(len(outcome.tokens) for outcome in outcomes)
    return {
        "accepted_length": round(made / max(passes, 1), 3),
        "nodes": round(sum(outcome.tally.drafted for outcome in outcomes) / max(passes, 1), 1),
        "tokens_per_second": round(written / sum(outcome.seconds for outcome in outcomes), 2),
    }


def show_recycling(figures: dict[str, Any]) -> None:
    """Print both tables."""
    columns = ("tokens a pass", "nodes", "tokens/s")
    for title, first, rows in (
        (f"Token Recycling, {TREE} nodes", "start", figures["starts"]),
        ("Token Recycling, hot start", "nodes", figures["trees"]),
    ):
        show_table(title, (first, *columns), [(name, *row.values()) for name, row in rows.items()])
