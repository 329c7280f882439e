"""The ablations of the REST paper on recorded outputs: store size, match length, draft shape, budget."""

import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.common import SEED, STRATEGY_NAMES, RecordingSet, Source, Workspace, evenly, first_documents
from benchmarks.measure import progress
from benchmarks.report import save_bars, save_lines, show_table
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.drafter import ContextSession, Drafter
from draftstore.search.suffix import find_rows
from draftstore.stores.rest.store import BUDGET, MAX_MATCH, STRATEGIES, RestDrafter, RestStore
from draftstore.text.tokens import sentinel
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
MATCHES = tuple(range(2, MAX_MATCH + 1))
BUDGETS = (8, 16, 32, 64, 128)
RANDOM_COPIES = 8
RANDOM_LENGTH = 8
Y_LABEL = "accepted length M (tokens per forward pass)"


class RandomContinuations:
    """Drafts what followed a few random occurrences of the longest match, merged into a tree."""

    def __init__(self, store: RestStore, copies: int = RANDOM_COPIES, length: int = RANDOM_LENGTH) -> None:
        """Read `length` tokens after up to `copies` occurrences; for stores of one segment."""
        if len(store.index.segments) != 1:
            raise ValueError("random continuations are drawn from a store of one segment")
        self._index = store.index
        self._matcher = store.drafter("longest")
        self._copies = copies
        self._length = length
        self.vocab_size = store.index.vocab_size
        self.context_size = self._matcher.context_size

    def draft(
        self, contexts: NDArray[np.int32], budget: int = BUDGET, min_prob: float = 0.0, queries: object = None  # noqa: ARG002
    ) -> list[Draft]:  # fmt: skip
        """Draft for a batch of contexts; see `ContextDrafter.draft`. The nodes have no probabilities."""
        matches = self._matcher.draft(contexts, 1)
        return [self._draft(context, match, budget) for context, match in zip(contexts, matches, strict=True)]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text."""
        return ContextSession(self, prompt_ids)

    def _draft(self, context: NDArray[np.int32], match: Draft, budget: int) -> Draft:
        """Draw occurrences by a seed that depends on the context alone."""
        size = match.match_length
        if size == 0:
            return match
        pattern = context[-size:].astype(np.int64)
        first = self._index.first_rows[0, pattern[0] : pattern[0] + 2].tolist()
        low, high = find_rows(self._index, 0, *first, 1, pattern, 0, size)
        rng = np.random.default_rng([SEED, zlib.crc32(pattern.tobytes())])
        rows = low + rng.choice(high - low, min(self._copies, high - low), replace=False)
        starts = self._index.suffixes[rows].astype(np.int64) + size
        return Draft(merge([self._read(start) for start in starts.tolist()], budget), size, high - low)

    def _read(self, start: int) -> list[int]:
        """Read on from a place, to the end of the document at most."""
        tokens: list[int] = self._index.tokens[start : start + self._length].tolist()
        end = sentinel(self._index.tokens.dtype)
        return tokens[: tokens.index(end)] if end in tokens else tokens


def merge(paths: Sequence[Sequence[int]], budget: int) -> DraftTree:
    """Merge token paths that start at the context into a tree, in the order of the paths."""
    nodes: dict[tuple[int, int], int] = {}
    for path in paths:
        parent = -1
        for token in path:
            if (parent, token) not in nodes and len(nodes) == budget:
                break
            parent = nodes.setdefault((parent, token), len(nodes))
    parents = np.array([parent for parent, _ in nodes], np.int16)
    tokens = np.array([token for _, token in nodes], np.int32)
    return DraftTree(tokens, parents, np.zeros(len(nodes), np.uint8))


def run_ablations(workspace: Workspace, source: Source, recorded: RecordingSet, rows: int) -> dict[str, Any]:
    """Replay every ablation; print a table and save a picture for each."""
    store = workspace.store(source)
    recordings = evenly(workspace.recordings(recorded), rows)
    subject = f"{len(recordings)} outputs of {recorded.model or recorded.file}, store {source.name}"
    draw = partial(_lines, workspace.out, recordings, subject)
    return {
        "subject": subject,
        "rows": len(recordings),
        "store_size": draw("store_size", _sizes(store), ("documents of the corpus (%)", Y_LABEL), 2.0),
        "max_match": draw("max_match", _matches(store), ("most tokens matched", Y_LABEL)),
        "budget": draw("budget", _budgets(store), ("most nodes of a draft", Y_LABEL), 2.0),
        "shape": _shapes(workspace.out, recordings, subject, store),
    }


Setting = tuple[float, dict[str, RestDrafter], int]
"""A value to draw over, a drafter for each strategy, the node budget."""


def _sizes(store: RestStore) -> list[Setting]:
    """Sort the first documents, more and more of them."""
    settings: list[Setting] = []
    for share in SHARES:
        index = first_documents(store, share)
        drafters = {name: RestDrafter(index, STRATEGIES[name]) for name in STRATEGY_NAMES}
        settings.append((100 * share, drafters, BUDGET))
    return settings


def _matches(store: RestStore) -> list[Setting]:
    """Match longer and longer contexts."""
    return [(n, {name: store.drafter(name, max_match=n) for name in STRATEGY_NAMES}, BUDGET) for n in MATCHES]


def _budgets(store: RestStore) -> list[Setting]:
    """Draft larger and larger trees."""
    return [(budget, {name: store.drafter(name) for name in STRATEGY_NAMES}, budget) for budget in BUDGETS]


def accepted_length(drafter: Drafter, recordings: Sequence[Recording], budget: int) -> dict[str, Any]:
    """Replay recordings and return the figures that do not depend on the machine."""
    result = replay(drafter, recordings, budget=budget)
    summary = result.summary()
    return {key: summary[key] for key in ("accepted_length", "nodes_mean", "miss_rate", "passes")}


def _lines(
    out: Path, recordings: Sequence[Recording], subject: str, name: str, settings: Sequence[Setting],
    labels: tuple[str, str], log_base: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Replay with every setting; show the accepted lengths as a table and as lines."""
    progress(f"ablation {name}: {len(settings)} settings")
    points: list[dict[str, Any]] = []
    for x, drafters, budget in settings:
        figures = {each: accepted_length(drafter, recordings, budget) for each, drafter in drafters.items()}
        points.append({"x": x, **figures})
    columns = [labels[0]] + [f"{each} {what}" for each in STRATEGY_NAMES for what in ("M", "nodes", "misses")]
    rows = (
        [f"{point['x']:g}", *(cell for each in STRATEGY_NAMES for cell in _cells(point[each]))]
        for point in points
    )
    show_table(f"accepted length by {name.replace('_', ' ')}: {subject}", columns, rows)
    lines = {each: [point[each]["accepted_length"] for point in points] for each in STRATEGY_NAMES}
    save_lines(out / f"{name}.png", subject, labels, [point["x"] for point in points], lines, log_base)
    return points


def _cells(figures: dict[str, Any]) -> list[object]:
    """Return accepted length, nodes and misses as table cells."""
    return [figures["accepted_length"], figures["nodes_mean"], f"{figures['miss_rate']:.1%}"]


def _shapes(
    out: Path, recordings: Sequence[Recording], subject: str, store: RestStore
) -> dict[str, dict[str, Any]]:
    """Compare the heaviest nodes of the trie with random continuations of the same match."""
    drafters: dict[str, Drafter] = {
        f"longest match:\n{BUDGET} heaviest nodes": store.drafter("longest"),
        f"longest match:\n{RANDOM_COPIES} random continuations": RandomContinuations(store),
        f"backoff:\n{BUDGET} best nodes": store.drafter("backoff"),
    }
    figures = {name: accepted_length(drafter, recordings, BUDGET) for name, drafter in drafters.items()}
    rows = ([name.replace("\n", " "), *_cells(values)] for name, values in figures.items())
    columns = ["draft", "M", "nodes", "misses"]
    show_table(f"accepted length by shape of the draft: {subject}", columns, rows)
    bars = {name: values["accepted_length"] for name, values in figures.items()}
    save_bars(out / "shape.png", subject, Y_LABEL, bars)
    return {name.replace("\n", " "): values for name, values in figures.items()}
