"""Texts during decoding, in slots of arrays: a step drafts for all of them with one call for each source.

    slots = Slots()
    slot = join(slots, drafter, prompt_ids)               at any time
    slots.propose([slot, ...], budgets, min_probs)        a `DraftBatch`, one draft for each text
    slots.observe([slot, ...], ids, stops)                the new ids of all texts, one after another
    slots.leave(slot)                                     at any time

A text has one source of drafts, or several whose drafts are merged (`draftstore.drafting.merging`). A source is shared
by all texts that draft from it, so a store, or a lookup service, gets one call for all texts. `SlotSession` is the
`Session` of one text. Drafters of others, which only have sessions, are called for each text.

A source that raises while texts of a mixture are drafted, or proposes an invalid tree, is disabled for the rest of the
texts concerned and counted (`Faults`). The error of an only source is raised.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import NO_MATCH, Drafter, Session, check_budget, check_ids
from draftstore.drafting.merging import learn_texts, merge_texts
from draftstore.errors import DraftTreeError, TokenRangeError
from draftstore.jit import as_input, read_only
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree

LOG = logging.getLogger(__name__)
IDS = 1 << 31
"""Limit of ids where no source has a vocabulary."""
FAILED = "failed"


def enlarged(array: NDArray[Any], *shape: int, fill: int = 0) -> NDArray[Any]:
    """Return an array with at least `shape` in its first dimensions: itself, or a copy with new cells of `fill`."""
    if all(old >= new for old, new in zip(array.shape, shape, strict=False)):
        return array
    wanted = map(max, array.shape, (*shape, *array.shape[len(shape) :]))
    larger = np.full(tuple(wanted), fill, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


class Prefill(NamedTuple):
    """A text that joins; see `Drafter.session`. Its ids, int32 [any], are valid for its source."""

    ids: NDArray[np.int32]
    hidden: NDArray[np.floating[Any]] | None = None
    candidates: NDArray[np.int32] | None = None


class Results(NamedTuple):
    """The results of a forward pass for a batch of texts; see `Slots.observe`."""

    slots: NDArray[np.int64]
    ids: NDArray[np.int32]
    stops: NDArray[np.int64]
    trees: Sequence[DraftTree | None]
    candidates: Sequence[NDArray[np.int32] | None]
    hidden: NDArray[np.floating[Any]] | None

    def new(self, place: int) -> NDArray[np.int32]:
        """Return the new ids of a text, int32 [any]."""
        return self.ids[(self.stops[place - 1] if place else 0) : self.stops[place]]

    def state(self, place: int) -> NDArray[np.floating[Any]] | None:
        """Return the hidden state of a text, float [hidden_size]; None if it is unknown."""
        return None if self.hidden is None or np.isnan(self.hidden[place]).all() else self.hidden[place]


class SlotSource(ABC):
    """The drafts of one source for texts in slots.

    Attributes:
        vocab_size: limit of ids.
    """

    vocab_size = IDS

    def needs(self, slot: int) -> tuple[bool, bool]:  # noqa: ARG002
        """Return whether a text needs candidates, and whether hidden states; see `Session`."""
        return False, False

    @abstractmethod
    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        """Start a text of a drafter of this source."""

    def leave(self, slot: int) -> None:  # noqa: B027
        """Forget a text, which may have failed to join."""

    @abstractmethod
    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Draft for texts, int64 [batch]; see `Session.propose`. The budget is at least 1."""

    @abstractmethod
    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception] | None:
        """Learn the results of a forward pass for texts at `places` of a batch; return errors by place."""


class SlotDrafter(ABC):
    """A `Drafter` of texts in slots."""

    @abstractmethod
    def join(self, slots: "Slots", prompt_ids: ArrayLike, **prefill: Any) -> int:
        """Start the drafts of one text; see `Drafter.session`. Returns its slot."""

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> "SlotSession":
        """Start the drafts of one text in slots of its own; see `Drafter.session`."""
        return start(self, prompt_ids, hidden=hidden, candidates=candidates)


class SourceDrafter(SlotDrafter):
    """A drafter whose drafts may be merged with those of others."""

    @property
    def source(self) -> Hashable:
        """Key shared by drafters with the same drafts."""
        return id(self)

    @abstractmethod
    def open_source(self, slots: "Slots") -> SlotSource:
        """Return the source of texts in slots."""

    def join(self, slots: "Slots", prompt_ids: ArrayLike, **prefill: Any) -> int:
        """Start the drafts of one text; see `Drafter.session`. Returns its slot."""
        return slots.join([self], prompt_ids, **prefill)


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


class SourceOutcome(NamedTuple):
    """One source's part of a step.

    Attributes:
        drafted: number of tokens in its own draft, verified or not.
        matched: number of these that became part of the text, verified or not.
        reason: why it drafted nothing; empty if it drafted.
    """

    drafted: int
    matched: int
    reason: str = ""


class _Text(NamedTuple):
    """The sources of a text, None in place of one that has failed; `faults` None: the only source is not merged."""

    sources: list[SlotSource | None]
    faults: Faults | None
    needs_candidates: bool
    needs_hidden: bool


class _Call(NamedTuple):
    """A call of one source in a step: the places of its texts in the batch, their slots, and its cells in tables."""

    source: SlotSource
    places: NDArray[np.int64]
    slots: NDArray[np.int64]
    cells: tuple[Any, Any]
    budget: int
    min_prob: float


class _Plan(NamedTuple):
    """The calls of a step, and its arguments as arrays; `alone`: the only call drafts for all texts, unmerged."""

    calls: list[_Call]
    index: NDArray[np.int64] | slice
    slots: NDArray[np.int64]
    budgets: NDArray[np.int64]
    levels: NDArray[np.int64]
    alone: bool


class Slots:
    """The texts of one decoding loop; not thread-safe.

    Attributes:
        capacity: number of slots.
        contexts: int32 [capacity, width], the last ids of each text, padded with -1 on the left.
        seen: float64 [capacity, sources, 2], expected and correct tokens of each source.
        drafted: int32 [capacity, sources], nodes of each source's last draft.
        matched: int32 [capacity, sources], number of these that became part of the text.
        wanted: bool [capacity], whether the last step requested a draft.
        reasons: uint8 [capacity, sources], index in `reason_names` of why a source drafted nothing.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.contexts: NDArray[np.int32] = np.empty((0, 0), np.int32)
        self.seen: NDArray[np.float64] = np.empty((0, 1, 2))
        self.drafted: NDArray[np.int32] = np.empty((0, 1), np.int32)
        self.matched, self.reasons = self.drafted.copy(), np.empty((0, 1), np.uint8)
        self.reason_names = [NO_MATCH, FAILED]
        self.wanted: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._waiting = self.wanted.copy()
        self._drafts = tuple(np.empty((0, 1, 1), dtype) for dtype in (np.int32, np.int16, np.uint8))
        self._mixed: NDArray[np.int64] = np.empty(0, np.int64)
        self._limits = self._mixed.copy()
        self._texts: dict[int, _Text] = {}
        self._sources: dict[Hashable, SlotSource] = {}
        self._plans: dict[str, tuple[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def join(
        self,
        drafters: Sequence[Drafter],
        prompt_ids: ArrayLike,
        *,
        faults: Faults | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> int:
        """Start the drafts of one text and return its slot; see `Drafter.session`.

        Args:
            drafters: its drafters; none: its drafts are empty.
            faults: counts failures of drafters whose drafts are merged; None: at most one drafter, which is not merged.

        Raises:
            DraftstoreError: a drafter rejects the text, as one for another model does.
        """
        slot = next(slot for slot in range(len(self._texts) + 1) if slot not in self._texts)
        sources = self._sources_of(drafters)
        limit = min((source.vocab_size for source in sources), default=IDS)
        self._reserve(slot + 1, max(1, len(sources)), 1, self.contexts.shape[1])
        self._texts[slot] = text = _Text([], faults, False, False)
        try:
            ids = read_only(check_ids(prompt_ids, limit, "the drafter's", parts=True).astype(np.int32))
            for drafter, source in zip(drafters, sources, strict=True):
                text.sources.append(source)
                source.join(slot, drafter, Prefill(ids, hidden, candidates))
        except Exception:
            self.leave(slot)
            raise
        needs = [source.needs(slot) for source in sources]
        self._texts[slot] = text._replace(
            needs_candidates=any(each for each, _ in needs), needs_hidden=any(each for _, each in needs)
        )
        self._mixed[slot], self._limits[slot] = 0 if faults is None else len(sources), limit
        for array in (self.seen, self.drafted, self.matched, self.reasons, self.wanted, self._waiting):
            array[slot] = 0
        width = self.contexts.shape[1]
        last = ids[-width:] if width else ids[:0]
        self.contexts[slot] = -1
        self.contexts[slot, width - len(last) :] = last
        self._plans.clear()
        return slot

    def leave(self, slot: int) -> None:
        """Remove a text."""
        for source in self._texts.pop(slot).sources:
            if source is not None:
                source.leave(slot)
        used = {id(source) for text in self._texts.values() for source in text.sources}
        self._sources = {key: source for key, source in self._sources.items() if id(source) in used}
        self._plans.clear()

    def needs(self, slot: int) -> tuple[bool, bool]:
        """Return whether a text needs candidates, and whether hidden states; see `Session`."""
        return self._texts[slot][2:]

    def propose(self, slots: Sequence[int], budgets: Sequence[int], min_probs: Sequence[float]) -> DraftBatch:
        """Return a draft for each text; see `Session.propose`.

        Each source of a mixture proposes nodes of any probability, since another may confirm unlikely ones.

        Args:
            slots: the texts, each at most once.
            budgets: maximum nodes of each draft; 0 skips a text.
            min_probs: minimum probability of the nodes of each draft.

        Raises:
            DraftstoreError: a budget is outside 0 .. 4,096. Errors of sources that are not merged are also raised.
        """
        plan = self._planned("propose", self._plan_drafts, tuple(slots), tuple(budgets), tuple(min_probs))
        if not plan.calls:
            return DraftBatch.empty(len(slots))
        self._waiting[plan.index] = True
        for call in plan.calls:
            batch = self._call(call)
            if plan.alone and batch is not None:
                return batch
        while True:
            place, column, node, *arrays = merge_texts(
                *self._drafts, self.drafted, self.seen, self._mixed, plan.slots, plan.budgets, plan.levels
            )
            if place < 0:
                return DraftBatch.plain(*arrays)
            slot = int(plan.slots[place])
            token, parent = (int(array[slot, column, node]) for array in self._drafts[:2])
            self.drafted[slot, column] = 0
            self._fail(slot, column, DraftTreeError(
                f"it proposed node {node} with token {token} and parent {parent}: expected a non-negative id, and -1 "
                "or an earlier node as parent",
            ))  # fmt: skip

    def observe(
        self,
        slots: Sequence[int],
        ids: NDArray[np.int32],
        stops: NDArray[np.int64],
        *,
        trees: Sequence[DraftTree | None] = (),
        candidates: Sequence[NDArray[np.int32] | None] = (),
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> dict[int, Exception]:
        """Learn the result of a forward pass; see `Session.observe`. Sequences of optional arguments may be empty.

        Args:
            slots: the texts, each at most once.
            ids: int32 [any], the new ids of all texts, one text after another.
            stops: int64 [batch], the end of each text's ids.
            trees: the verified tree of each text.
            candidates: int32 [n + 1, 8] of each text.
            hidden: float [batch, hidden_size], NaN where unknown.

        Returns:
            Errors by place in the batch; such a text has learned nothing from at least one source.
        """
        plan = self._planned("observe", self._plan_learning, tuple(slots))
        ids, stops = read_only(ids), read_only(stops)
        errors: dict[int, Exception] = {}
        while (place := self._learn(plan.slots, ids, stops)) >= 0:
            begin, end = int(stops[place - 1]) if place else 0, int(stops[place])
            if (wrong := self._reject(int(plan.slots[place]), ids[begin:end])) is not None:
                errors[place] = wrong
                ids, stops = np.delete(ids, slice(begin, end)), stops.copy()
                stops[place:] -= end - begin
                ids, stops = read_only(ids), read_only(stops)
            plan = self._planned("observe", self._plan_learning, tuple(slots))
        none = [None] * len(slots)
        results = Results(plan.slots, ids, stops, trees or none, candidates or none, hidden)
        wrong_places = [*errors]
        for call in plan.calls:
            places = call.places
            if wrong_places:
                places = np.setdiff1d(places, wrong_places, assume_unique=True)
            try:
                failed = call.source.observe(places, results) or {}
            except Exception as error:  # noqa: BLE001 (of one source)
                failed = dict.fromkeys(places.tolist(), error)
            for place, why in failed.items():
                column = self._texts[slots[place]].sources.index(call.source)
                if not self._fail(slots[place], column, why):
                    errors[place] = why
        return errors

    def _learn(self, slots: NDArray[np.int64], ids: NDArray[np.int32], stops: NDArray[np.int64]) -> int:
        wrong: int = learn_texts(
            self.contexts, *self._drafts, self.drafted, self.seen, self.matched, self._waiting, self._limits, slots,
            ids, stops,
        )  # fmt: skip
        return wrong

    def outcomes(self, slot: int) -> list[SourceOutcome]:
        """Return the part of each source in the last step of a text; empty if no nodes were requested."""
        if not self.wanted[slot]:
            return []
        rows = zip(
            self.drafted[slot].tolist(), self.matched[slot].tolist(), self.reasons[slot].tolist(), strict=True
        )
        return [
            SourceOutcome(drafted, matched, "" if drafted else self.reason_names[reason])
            for (drafted, matched, reason), _ in zip(rows, self._texts[slot].sources, strict=False)
        ]

    def _sources_of(self, drafters: Sequence[Drafter]) -> list[SlotSource]:
        """Return the sources of a text, with room for the contexts that they need; no source is there twice."""
        keys: list[Any] = []
        for drafter in drafters:
            own = drafter if isinstance(drafter, SourceDrafter) else None
            key = None if own is None else own.source
            keys.append((key, sum(key == other for other, _ in keys)))
            if keys[-1] not in self._sources:
                self._sources[keys[-1]] = SessionSource() if own is None else own.open_source(self)
        return [self._sources[key] for key in keys]

    def need_context(self, size: int) -> None:
        """Keep at least the last `size` ids of texts that join from now on."""
        if size > self.contexts.shape[1]:
            old, self.contexts = self.contexts, np.full((self.capacity, size), -1, np.int32)
            self.contexts[:, size - old.shape[1] :] = old

    def _reserve(self, slots: int, sources: int, nodes: int, width: int) -> None:
        self.capacity = max(self.capacity, slots if slots <= self.capacity else slots * 3 // 2)
        slots = self.capacity
        self.contexts = enlarged(self.contexts, slots, width, fill=-1)
        self.seen, self.drafted = enlarged(self.seen, slots, sources), enlarged(self.drafted, slots, sources)
        self.matched, self.reasons = (
            enlarged(self.matched, slots, sources),
            enlarged(self.reasons, slots, sources),
        )
        self.wanted, self._waiting = enlarged(self.wanted, slots), enlarged(self._waiting, slots)
        self._mixed, self._limits = enlarged(self._mixed, slots), enlarged(self._limits, slots)
        self._drafts = tuple(enlarged(each, slots, self.drafted.shape[1], nodes) for each in self._drafts)

    def _planned(self, kind: str, make: Any, *arguments: Any) -> Any:
        """Return the plan of a step, which is that of the step before as long as its arguments and texts are equal."""
        known = self._plans.get(kind)
        if known is None or known[0] != arguments:
            known = self._plans[kind] = arguments, make(*arguments)
        return known[1]

    def _plan_drafts(
        self, slots: tuple[int, ...], budgets: tuple[int, ...], least: tuple[float, ...]
    ) -> _Plan:
        groups: dict[tuple[int, int, float], list[tuple[int, int]]] = {}
        sources: dict[int, SlotSource] = {}
        levels = [check_budget(budget, min_prob) for budget, min_prob in zip(budgets, least, strict=True)]
        for place, slot in enumerate(slots):
            text, budget = self._texts[slot], budgets[place]
            for column, source in enumerate(text.sources):
                if source is not None and budget > 0 and levels[place] >= 0:
                    key = id(source), budget, least[place] if text.faults is None else 0.0
                    groups.setdefault(key, []).append((place, column))
                    sources[id(source)] = source
        rows = np.array(slots, np.int64)
        self._reserve(0, 1, max(budgets, default=0), 0)
        plan = _Plan(
            [
                _call_at(sources[each], rows, group, budget, min_prob)
                for (each, budget, min_prob), group in groups.items()
            ],
            _compact(rows),
            read_only(rows),
            read_only(np.array(budgets, np.int64)),
            read_only(np.array(levels, np.int64)),
            [*map(len, groups.values())] == [len(slots)] and not self._mixed[rows].any(),
        )
        self.wanted[rows] = (plan.budgets > 0) & (plan.levels >= 0)
        self.drafted[rows] = self.matched[rows] = 0
        return plan

    def _plan_learning(self, slots: tuple[int, ...]) -> _Plan:
        groups: dict[int, list[tuple[int, int]]] = {}
        sources: dict[int, SlotSource] = {}
        for place, slot in enumerate(slots):
            for column, source in enumerate(self._texts[slot].sources):
                if source is not None:
                    groups.setdefault(id(source), []).append((place, column))
                    sources[id(source)] = source
        rows = read_only(np.array(slots, np.int64))
        return _Plan(
            [_call_at(sources[each], rows, group) for each, group in groups.items()],
            rows,
            rows,
            rows,
            rows,
            False,
        )

    def _call(self, call: _Call) -> DraftBatch | None:
        """Let one source draft; if that fails, for each text alone. Returns the drafts of a call that succeeded."""
        try:
            batch = call.source.propose(call.slots, call.budget, call.min_prob)
            if len(batch.sizes) != len(call.slots):
                raise DraftTreeError(f"{len(batch.sizes)} drafts for {len(call.slots)} texts")
        except Exception as error:  # (of one text: the others continue)
            if len(call.places) > 1:
                for place, slot in enumerate(call.slots):
                    column = self._texts[slot].sources.index(call.source)
                    self._call(
                        _call_at(call.source, call.slots, [(place, column)], call.budget, call.min_prob)
                    )
            elif not self._fail(int(call.slots[0]), int(call.cells[1]), error):
                raise
            else:
                self.drafted[call.cells] = 0
            return None
        width = batch.tokens.shape[1]
        tokens, parents, levels = self._drafts
        tokens[(*call.cells, slice(width))] = batch.tokens
        parents[(*call.cells, slice(width))] = batch.parents
        levels[(*call.cells, slice(width))] = batch.levels
        self.drafted[call.cells] = batch.sizes
        if batch.reason not in self.reason_names:
            self.reason_names.append(batch.reason)
        self.reasons[call.cells] = self.reason_names.index(batch.reason)
        return batch

    def _fail(self, slot: int, column: int, error: Exception) -> bool:
        """Disable a source of a mixture for a text; return False if it is the only source, which is not disabled."""
        text = self._texts[slot]
        if text.faults is None:
            return False
        source = text.sources[column]
        text.sources[column] = None
        text.faults.add(column, error)
        if source is not None:
            source.leave(slot)
        self._limits[slot] = min((each.vocab_size for each in text.sources if each is not None), default=IDS)
        self.reasons[slot, column] = 1
        self._plans.clear()
        return True

    def _reject(self, slot: int, ids: NDArray[np.int32]) -> Exception | None:
        """Disable the sources of a mixture that lack an id; return the error of a text that cannot go on."""
        text = self._texts[slot]
        try:
            check_ids(ids, self._limits[slot] if text.faults is None else IDS, "the drafter's", parts=True)
        except TokenRangeError as error:
            return error
        for column, source in enumerate(text.sources):
            if source is not None:
                try:
                    check_ids(ids, source.vocab_size, "the drafter's", parts=True)
                except TokenRangeError as error:
                    self._fail(slot, column, error)
        return None


def _call_at(
    source: SlotSource, rows: NDArray[np.int64], group: list[tuple[int, int]], budget: int = 0, min_prob: float = 0.0
) -> _Call:  # fmt: skip
    """Return a call for texts by place and column."""
    places, columns = np.array(group, np.int64).T
    slots = as_input(rows[places], np.int64)
    cells = (_compact(slots), int(columns[0])) if (columns == columns[0]).all() else (slots, columns)
    return _Call(source, as_input(places, np.int64), slots, cells, budget, min_prob)


def _compact(slots: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return an index of slots: a slice, which is faster, if they follow each other."""
    first, count = int(slots[0]) if len(slots) else 0, len(slots)
    return slice(first, first + count) if (slots == np.arange(first, first + count)).all() else slots


class SessionSource(SlotSource):
    """The sessions of drafters that draft for one text at a time."""

    def __init__(self) -> None:
        self._sessions: dict[int, Session] = {}

    def needs(self, slot: int) -> tuple[bool, bool]:
        """Return what the session needs."""
        session = self._sessions[slot]
        return session.needs_candidates, session.needs_hidden

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        """Start the session of a text."""
        self._sessions[slot] = drafter.session(
            prefill.ids, hidden=prefill.hidden, candidates=prefill.candidates
        )

    def leave(self, slot: int) -> None:
        """Drop the session of a text."""
        self._sessions.pop(slot, None)

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        """Let each session propose; see `SlotSource`."""
        return DraftBatch.of(
            [_checked(self._sessions[slot].propose(budget, min_prob), budget) for slot in slots.tolist()]
        )

    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception]:
        """Let each session learn; see `SlotSource`."""
        errors = {}
        for place in places.tolist():
            try:
                self._sessions[int(results.slots[place])].observe(
                    results.new(place),
                    tree=results.trees[place],
                    candidates=results.candidates[place],
                    hidden=results.state(place),
                )
            except Exception as error:  # noqa: BLE001 (of this text alone)
                errors[place] = error
        return errors


def _checked(tree: DraftTree, budget: int) -> tuple[Any, ...]:
    """Return the arrays of a proposal, cut to the budget; DraftTreeError if it is not a tree."""
    types = {"tokens": np.int32, "parents": np.int16, "levels": np.uint8}
    try:
        arrays = [
            np.asarray(getattr(tree, name)).astype(dtype, casting="same_kind", copy=False)
            for name, dtype in types.items()
        ]
    except Exception as error:
        raise DraftTreeError(f"its proposal is not a tree: {error}") from error
    if len({*(array.shape for array in arrays), (len(arrays[0]),)}) != 1:
        raise DraftTreeError(
            "its proposal is not a tree: expected a token, a parent and a level for each node"
        )
    tokens, parents, levels = (array[:budget] for array in arrays)
    wrong = np.flatnonzero((tokens < 0) | (parents < -1) | (parents >= np.arange(len(tokens))))
    if len(wrong):
        raise DraftTreeError(
            f"it proposed node {wrong[0]} with token {tokens[wrong[0]]} and parent {parents[wrong[0]]}: expected a "
            "non-negative id, and -1 or an earlier node as parent"
        )
    return tokens, parents, levels, 0, 0


class SlotSession:
    """The drafts of one text in a slot: a `Session`.

    Attributes:
        slots: the slots.
        slot: the text's.
    """

    def __init__(self, slots: Slots, slot: int) -> None:
        self.slots, self.slot = slots, slot
        self.needs_candidates, self.needs_hidden = slots.needs(slot)

    def propose(self, budget: int = BUDGET, min_prob: float = 0.0) -> DraftTree:
        """Return a draft; see `Session`."""
        return self.slots.propose((self.slot,), (budget,), (min_prob,)).trees()[0]

    def observe(
        self,
        accepted_ids: ArrayLike,
        *,
        tree: DraftTree | None = None,
        candidates: NDArray[np.int32] | None = None,
        hidden: NDArray[np.floating[Any]] | None = None,
    ) -> None:
        """Learn the result of a forward pass; see `Session`.

        Raises:
            TokenRangeError: an id is outside the vocabulary of an only source; then nothing is learned.
            DraftstoreError: candidates or hidden states of the wrong shape for it.
        """
        ids = check_ids(accepted_ids, IDS, parts=True).astype(np.int32)
        states = None if hidden is None else hidden[None]
        errors = self.slots.observe(
            (self.slot,), ids, np.array([len(ids)]), trees=(tree,), candidates=(candidates,), hidden=states
        )
        for error in errors.values():
            raise error


def start(
    drafter: Drafter | None, prompt_ids: ArrayLike, *, slots: Slots | None = None, **prefill: Any
) -> SlotSession:
    """Start the drafts of one text of any drafter, None for none, in `slots` or its own; see `Drafter.session`."""
    slots = Slots() if slots is None else slots
    if isinstance(drafter, SlotDrafter):
        return SlotSession(slots, drafter.join(slots, prompt_ids, **prefill))
    return SlotSession(slots, slots.join([] if drafter is None else [drafter], prompt_ids, **prefill))
