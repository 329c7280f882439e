"""Plans of a step: which source drafts or learns for which texts of a batch, in as few calls as possible."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.drafter import check_budget
from draftstore.drafting.sources import SlotSource
from draftstore.jit import as_input, read_only

LOG = logging.getLogger(__name__)


class Faults:
    """Number of texts for which each source of a mixture was disabled, by its position."""

    def __init__(self, sources: int) -> None:
        self.counts = [0] * sources

    def add(self, place: int, error: object) -> None:
        """Count a failure; the first, second, fourth, eighth, ... of a source is logged."""
        self.counts[place] += 1
        count = self.counts[place]
        if count & (count - 1) == 0:
            LOG.warning("drafter %d of a mixture has been disabled for %d texts: %s", place + 1, count, error)


class Text(NamedTuple):
    """The sources of a text, None in place of one that has failed; `faults` None: the only source is not merged."""

    sources: list[SlotSource | None]
    faults: Faults | None


class Call(NamedTuple):
    """A call of one source in a step: the places of its texts in the batch, their slots, and its cells in tables."""

    source: SlotSource
    places: NDArray[np.int64]
    slots: NDArray[np.int64]
    cells: tuple[Any, Any]
    budget: int
    min_prob: float


class Plan(NamedTuple):
    """The arguments of a step as arrays, and its calls; `alone`: the only call drafts for all texts, unmerged."""

    slots: NDArray[np.int64]
    where: NDArray[np.int64] | slice
    budgets: NDArray[np.int64]
    levels: NDArray[np.int64]
    calls: list[Call]
    alone: bool


def plan_drafts(
    texts: Sequence[Text], slots: Sequence[int], budgets: Sequence[int], min_probs: Sequence[float]
) -> Plan:
    """Return the calls that draft; a mixture's sources propose nodes of any probability, see `Slots.propose`."""
    levels = [check_budget(budget, min_prob) for budget, min_prob in zip(budgets, min_probs, strict=True)]
    arguments = [
        (budget, 0.0 if text.faults else min_prob) if budget > 0 and level >= 0 else None
        for text, budget, min_prob, level in zip(texts, budgets, min_probs, levels, strict=True)
    ]
    return _plan(texts, slots, arguments, budgets, levels)


def plan_lessons(texts: Sequence[Text], slots: Sequence[int]) -> Plan:
    """Return the calls that learn the results of a pass."""
    return _plan(texts, slots, [(0, 0.0)] * len(texts), (), ())


def _plan(
    texts: Sequence[Text],
    slots: Sequence[int],
    arguments: Sequence[tuple[int, float] | None],
    budgets: Sequence[int],
    levels: Sequence[int],
) -> Plan:
    groups: dict[tuple[int, int, float], list[tuple[int, int]]] = {}
    sources: dict[int, SlotSource] = {}
    for place, (text, wanted) in enumerate(zip(texts, arguments, strict=True)):
        for column, source in enumerate(text.sources if wanted else ()):
            if source is not None and wanted:
                sources[id(source)] = source
                groups.setdefault((id(source), *wanted), []).append((place, column))
    rows = np.array(slots, np.int64)
    calls = [call_at(sources[key[0]], rows, group, *key[1:]) for key, group in groups.items()]
    merged = any(text.faults is not None and text.sources for text in texts)
    alone = not merged and [len(call.places) for call in calls] == [len(slots)]
    arrays = read_only(np.array(budgets, np.int64)), read_only(np.array(levels, np.int64))
    return Plan(read_only(rows), _compact(rows), *arrays, calls, alone)


def call_at(
    source: SlotSource, rows: NDArray[np.int64], group: list[tuple[int, int]], budget: int, min_prob: float
) -> Call:
    """Return a call of a source for texts by place and column."""
    places, columns = np.array(group, np.int64).T
    slots = as_input(rows[places], np.int64)
    cells = (_compact(slots), int(columns[0])) if (columns == columns[0]).all() else (slots, columns)
    return Call(source, as_input(places, np.int64), slots, cells, budget, min_prob)


def _compact(slots: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return an index of slots: a slice, which is faster, if they follow each other."""
    if len(slots) and (slots == np.arange(slots[0], slots[0] + len(slots))).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots
