"""Texts during decoding, in slots of arrays: a step drafts for all of them with one call for each source.

    slots = Slots()
    slot = start(drafter, prompt_ids, slots=slots).slot   at any time
    slots.propose([slot, ...], budgets, min_probs)        a `DraftBatch`, one draft for each text
    slots.observe([slot, ...], ids, stops)                the new ids of all texts, one text after another
    slots.leave(slot)                                     at any time

A text has one source of drafts, or several whose drafts are merged (`draftstore.drafting.merging`). A source is shared
by all texts that draft from it, so a store, or a lookup service, gets one call for all. `SlotSession` is the `Session`
of one text.

A source that raises while texts of a mixture are drafted, or proposes an invalid tree, is disabled for the rest of the
texts concerned and counted (`Faults`). The error of an only source is raised.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.drafting.drafter import NO_MATCH, Drafter, check_ids
from draftstore.drafting.merging import learn_texts, merge_texts
from draftstore.drafting.outcomes import FAILED, SourceOutcome
from draftstore.drafting.plans import Call, Faults, Plan, Text, call_at, plan_drafts, plan_lessons
from draftstore.drafting.sources import IDS, Prefill, Results, SessionSource, SlotSource
from draftstore.errors import TokenRangeError
from draftstore.jit import as_input, read_only
from draftstore.trees.batch import DraftBatch
from draftstore.trees.frontier import BUDGET
from draftstore.trees.tree import DraftTree


def enlarged(array: NDArray[Any], *shape: int, fill: int = 0) -> NDArray[Any]:
    """Return an array with at least `shape` in its first dimensions: itself, or a copy with new cells of `fill`."""
    wanted = [*map(max, array.shape, (*shape, *array.shape[len(shape) :]))]
    if wanted == [*array.shape]:
        return array
    larger = np.full(wanted, fill, array.dtype)
    larger[tuple(map(slice, array.shape))] = array
    return larger


class SlotDrafter:
    """A `Drafter` of texts in slots: it overrides `open_source`, or `join` if it starts texts of other drafters."""

    @property
    def source(self) -> Hashable:
        """Key shared by drafters with the same drafts."""
        return id(self)

    def open_source(self, slots: "Slots") -> SlotSource:  # noqa: ARG002
        """Return the source of texts in slots."""
        return SessionSource()

    def join(self, slots: "Slots", prompt_ids: ArrayLike, **prefill: Any) -> int:
        """Start the drafts of one text; see `Drafter.session`. Returns its slot."""
        return slots.join([self], prompt_ids, **prefill)

    def session(
        self,
        prompt_ids: ArrayLike,
        *,
        hidden: NDArray[np.floating[Any]] | None = None,
        candidates: NDArray[np.int32] | None = None,
    ) -> "SlotSession":
        """Start the drafts of one text in slots of its own; see `Drafter.session`."""
        return start(self, prompt_ids, hidden=hidden, candidates=candidates)


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
        self.matched, self.reasons = self.drafted, self.drafted.astype(np.uint8)
        self.wanted: NDArray[np.bool_] = np.empty(0, np.bool_)
        self.reason_names = [NO_MATCH, FAILED]
        self._drafts = tuple(np.empty((0, 1, 1), dtype) for dtype in (np.int32, np.int16, np.uint8))
        self._waiting = self.wanted  # drafts that have not been compared with the text
        self._mixed: NDArray[np.int64] = np.empty(0, np.int64)  # sources to merge
        self._limits = self._mixed  # of ids
        self._texts: dict[int, Text] = {}
        self._sources: dict[Hashable, SlotSource] = {}
        self._plans: dict[bool, tuple[tuple[Any, ...], Plan]] = {}

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
        prompt_size: int | None = None,
    ) -> int:
        """Start the drafts of one text and return its slot; see `Drafter.session`.

        Args:
            drafters: its drafters; none: its drafts are empty.
            faults: counts failures of drafters whose drafts are merged; None: at most one drafter, which is not merged.
            prompt_size: ids of the prompt, if the text resumes after a part of its answer; None: all but the last.

        Raises:
            DraftstoreError: a drafter rejects the text, as one for another model does.
        """
        slot = next(slot for slot in range(len(self._texts) + 1) if slot not in self._texts)
        text = self._texts[slot] = Text([], faults)
        try:
            sources = self._sources_of(drafters)
            self._reserve(slot + 1, len(sources))
            self._limits[slot] = min((source.vocab_size for source in sources), default=IDS)
            ids = check_ids(prompt_ids, self._limits[slot], "the drafter's", parts=True).astype(np.int32)
            for drafter, source in zip(drafters, sources, strict=True):
                text.sources.append(source)
                source.join(slot, drafter, Prefill(read_only(ids), hidden, candidates, prompt_size))
        except Exception:
            self.leave(slot)
            raise
        self._mixed[slot] = 0 if faults is None else len(sources)
        for array in (self.seen, self.drafted, self.matched, self.reasons, self.wanted, self._waiting):
            array[slot] = 0
        last = ids[max(0, len(ids) - self.contexts.shape[1]) :]
        self.contexts[slot] = -1
        self.contexts[slot, self.contexts.shape[1] - len(last) :] = last
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
        needs = [source.needs(slot) for source in self._texts[slot].sources if source is not None]
        return any(candidates for candidates, _ in needs), any(hidden for _, hidden in needs)

    def need_context(self, size: int) -> None:
        """Keep at least the last `size` ids of texts that join from now on."""
        if size > self.contexts.shape[1]:
            old, self.contexts = self.contexts, np.full((self.capacity, size), -1, np.int32)
            self.contexts[:, size - old.shape[1] :] = old

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
        plan = self._planned(True, tuple(slots), tuple(budgets), tuple(min_probs))
        if not plan.calls:
            return DraftBatch.empty(len(slots))
        self._waiting[plan.where] = True
        for call in plan.calls:
            batch = self._call(call)
            if plan.alone and batch is not None:
                return batch
        arrays = merge_texts(
            *self._drafts, self.drafted, self.seen, self._mixed, plan.slots, plan.budgets, plan.levels
        )
        return DraftBatch.plain(*arrays)

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
        plan, errors = self._planned(False, tuple(slots)), dict[int, Exception]()
        ids, stops = read_only(ids), read_only(stops)
        while (
            place := learn_texts(
                self.contexts, *self._drafts, self.drafted, self.seen, self.matched, self._waiting, self._limits,
                plan.slots, ids, stops,
            )
        ) >= 0:  # fmt: skip
            begin, end = int(stops[place - 1]) if place else 0, int(stops[place])
            if (wrong := self._reject(slots[place], ids[begin:end])) is not None:
                errors[place] = wrong
                ids, stops = (
                    np.delete(ids, slice(begin, end)),
                    stops - (np.arange(len(stops)) >= place) * (end - begin),
                )
                ids, stops = read_only(ids), read_only(stops)
            plan = self._planned(False, tuple(slots))
        none = [None] * len(slots)
        results = Results(plan.slots, ids, stops, trees or none, candidates or none, hidden)
        for call in plan.calls:
            places = call.places
            if errors:  # such a text learns nothing
                places = as_input(np.setdiff1d(places, [*errors]), np.int64)
            try:
                failed = call.source.observe(places, results) or {}
            except Exception as error:  # noqa: BLE001 (of one source)
                failed = dict.fromkeys(places.tolist(), error)
            for place, why in failed.items():
                if not self._fail(slots[place], call.source, why):
                    errors[place] = why
        return errors

    def outcomes(self, slots: Sequence[int]) -> "Outcomes":
        """Return the part of each source in the last step of texts."""
        rows = np.array(slots, np.int64)
        if not (wanted := self.wanted[rows]).any():
            return Outcomes(wanted, self.drafted, self.matched, self.reasons, (), self.reason_names)
        sources = [len(self._texts[slot].sources) for slot in slots]
        drafted, matched, reasons = self.drafted[rows], self.matched[rows], self.reasons[rows]
        return Outcomes(wanted, drafted, matched, reasons, sources, self.reason_names)

    def _sources_of(self, drafters: Sequence[Drafter]) -> list[SlotSource]:
        """Return the sources of a text; no source is there twice."""
        keys: list[tuple[Hashable, int]] = []
        for drafter in drafters:
            own = drafter if isinstance(drafter, SlotDrafter) else SlotDrafter()
            key = own.source if own is drafter else None
            keys.append((key, sum(key == other for other, _ in keys)))
            if keys[-1] not in self._sources:
                self._sources[keys[-1]] = own.open_source(self)
        return [self._sources[key] for key in keys]

    def _reserve(self, slots: int = 0, sources: int = 0, nodes: int = 0) -> None:
        """Make room for slots, sources of a text, and nodes of a draft."""
        self.capacity = slots = self.capacity if slots <= self.capacity else slots * 3 // 2
        self.contexts, self.seen = enlarged(self.contexts, slots), enlarged(self.seen, slots, sources)
        self.drafted, self.matched, self.reasons = (
            enlarged(each, slots, sources) for each in (self.drafted, self.matched, self.reasons)
        )
        self.wanted, self._waiting, self._mixed, self._limits = (
            enlarged(each, slots) for each in (self.wanted, self._waiting, self._mixed, self._limits)
        )
        self._drafts = tuple(enlarged(each, slots, sources, nodes) for each in self._drafts)

    def _planned(
        self, drafts: bool, slots: tuple[int, ...], budgets: tuple[int, ...] = (), least: tuple[float, ...] = ()
    ) -> Plan:  # fmt: skip
        """Return the plan to draft or to learn, which is made anew if texts or arguments have changed."""
        known = self._plans.get(drafts)
        if known is not None and known[0] == (slots, budgets, least):
            return known[1]
        texts = [self._texts[slot] for slot in slots]
        plan = plan_drafts(texts, slots, budgets, least) if drafts else plan_lessons(texts, slots)
        if drafts:
            self._reserve(nodes=max(budgets, default=0))
            self.wanted[plan.slots] = (plan.budgets > 0) & (plan.levels >= 0)
            self.drafted[plan.slots] = self.matched[plan.slots] = 0
        self._plans[drafts] = (slots, budgets, least), plan
        return plan

    def _call(self, call: Call) -> DraftBatch | None:
        """Let one source draft; if that fails, for each text alone. Returns the drafts of a call that succeeded."""
        try:
            batch = call.source.propose(call.slots, call.budget, call.min_prob)
            nodes = slice(batch.tokens.shape[1])
            for array, drafts in zip(self._drafts, batch[:3], strict=True):
                array[(*call.cells, nodes)] = drafts
            self.drafted[call.cells] = batch.sizes
        except Exception as error:  # (of one text: the others continue)
            self.drafted[call.cells] = 0
            if len(call.places) > 1:
                for place, slot in enumerate(call.slots.tolist()):
                    group = [(place, self._texts[slot].sources.index(call.source))]
                    self._call(call_at(call.source, call.slots, group, call.budget, call.min_prob))
            elif not self._fail(int(call.slots[0]), call.source, error):
                raise
            return None
        if batch.reason not in self.reason_names:
            self.reason_names.append(batch.reason)
        self.reasons[call.cells] = self.reason_names.index(batch.reason)
        return batch

    def _fail(self, slot: int, source: SlotSource, error: Exception) -> bool:
        """Disable a source of a mixture for a text; return False if it is the only source, which is not disabled."""
        sources, faults = self._texts[slot]
        if faults is None:
            return False
        column = sources.index(source)
        faults.add(column, error)
        source.leave(slot)
        sources[column] = None
        self._limits[slot] = min((each.vocab_size for each in sources if each is not None), default=IDS)
        self.reasons[slot, column] = self.reason_names.index(FAILED)
        self._plans.clear()
        return True

    def _reject(self, slot: int, ids: NDArray[np.int32]) -> Exception | None:
        """Disable the sources of a mixture that lack an id; return the error of a text that cannot go on."""
        try:
            check_ids(ids, IDS, "the model's", parts=True)
        except TokenRangeError as error:
            return error
        for source in [each for each in self._texts[slot].sources if each is not None]:
            try:
                check_ids(ids, source.vocab_size, "the drafter's", parts=True)
            except TokenRangeError as error:
                if not self._fail(slot, source, error):
                    return error
        return None


class Outcomes(NamedTuple):
    """The part of each source in a step of some texts; see the attributes of `Slots`, of which these are copies."""

    wanted: NDArray[np.bool_]
    drafted: NDArray[np.int32]
    matched: NDArray[np.int32]
    reasons: NDArray[np.uint8]
    sources: Sequence[int]
    reason_names: Sequence[str]

    def of(self, place: int) -> list[SourceOutcome]:
        """Return the outcomes of a text by its place; empty if no nodes were requested."""
        if not self.wanted[place]:
            return []
        rows = (
            array[place, : self.sources[place]].tolist()
            for array in (self.drafted, self.matched, self.reasons)
        )
        return [
            SourceOutcome(drafted, matched, "" if drafted else self.reason_names[reason])
            for drafted, matched, reason in zip(*rows, strict=True)
        ]


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
