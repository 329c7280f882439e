"""Replays of the DReSD benchmark: draft shapes, and the three figures that drafting is compared by."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.measure import percentiles
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import ContextDrafter, ContextSession, Drafter
from draftstore.trees.batch import Draft
from draftstore.trees.frontier import MAX_BUDGET
from draftstore.trees.tree import DraftTree

Row = dict[str, Any]


class Outcome(NamedTuple):
    """What a drafter achieved.

    Attributes:
        accepted_length: M, tokens a pass.
        acceptance: accepted tokens of a pass by the length of a draft: how much of the best of its drafts came true, as
            the paper counts it; the mean over prompts, in percent.
        node_rate: accepted by verified nodes; the mean over prompts, in percent.
        nodes: verified in a pass.
        passes: verification calls.
        lookup_us: p50 and p99 of a draft.
    """

    accepted_length: float
    acceptance: float
    node_rate: float
    nodes: float
    passes: int
    lookup_us: dict[str, float]

    def row(self) -> list[object]:
        """Return the cells of a table."""
        return [
            self.accepted_length,
            self.acceptance,
            self.node_rate,
            self.nodes,
            self.passes,
            self.lookup_us["p50"],
        ]


COLUMNS = ["drafter", "M", "acceptance %", "of nodes %", "nodes a pass", "passes", "p50 µs"]


def run(drafter: Drafter, recordings: Sequence[Recording], length: int, budget: int = MAX_BUDGET) -> Outcome:
    """Replay recordings.

    Args:
        drafter: is asked once a pass.
        recordings: with hidden states.
        length: of a draft, in tokens.
        budget: most nodes.
    """
    replay(drafter, recordings[:1], budget=budget)  # compiles what it needs
    results = [
        replay(drafter, [recording], budget=budget) for recording in recordings if len(recording.output) > 1
    ]
    tokens, passes = sum(each.tokens for each in results), sum(each.passes for each in results)
    accepted = [each.accepted / (each.passes * length) for each in results]
    times = percentiles(np.concatenate([each.lookup_ns for each in results]) / 1000)
    return Outcome(
        round(tokens / passes, 4),
        round(100 * float(np.mean(accepted)), 3),
        round(100 * float(np.mean([each.acceptance_rate for each in results])), 3),
        round(sum(each.nodes for each in results) / passes, 2),
        passes,
        {"p50": times["p50"], "p99": times["p99"]},
    )


class Paths:
    """The likeliest drafts of another drafter, a `ContextDrafter`: a store of text in the shape of a dense one."""

    def __init__(self, drafter: ContextDrafter, drafts: int) -> None:
        """Keep so many paths of what `drafter` proposes."""
        self._drafter = drafter
        self._drafts = drafts
        self.context_size = drafter.context_size
        self.vocab_size = drafter.vocab_size

    def draft(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, queries: object = None  # noqa: ARG002
    ) -> list[Draft]:  # fmt: skip
        """Draft for a batch of contexts; see `ContextDrafter.draft`."""
        drafts = self._drafter.draft(contexts, MAX_BUDGET, min_prob)
        return [draft._replace(tree=best_paths(draft.tree, self._drafts).prefix(budget)) for draft in drafts]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text; see `Drafter.session`."""
        return ContextSession(self, prompt_ids)


def best_paths(tree: DraftTree, count: int) -> DraftTree:
    """Return the paths to the likeliest leaves of a tree."""
    parents = tree.parents.tolist()
    inner = set(parents)
    leaves = [node for node in range(len(tree)) if node not in inner][:count]
    kept: set[int] = set()
    for leaf in leaves:
        kept.update(tree.path(leaf))
    order = sorted(kept)
    places = {node: place for place, node in enumerate(order)} | {-1: -1}
    return DraftTree(
        tree.tokens[order],
        np.array([places[parents[node]] for node in order], np.int16),
        tree.levels[order],
    )


def as_json(outcomes: Mapping[str, Outcome]) -> dict[str, Row]:
    """Return outcomes as JSON values."""
    return {name: outcome._asdict() for name, outcome in outcomes.items()}
