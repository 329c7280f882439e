"""Drafts for many texts in one call: each gets what it gets alone, by a slow oracle, whatever becomes of the others."""

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from draftstore.decoding.replay import Recording, read_recordings
from draftstore.drafting import request
from draftstore.drafting.contexts import ContextDrafter
from draftstore.drafting.drafter import SEPARATOR, Drafter, Session, check_budget, check_ids
from draftstore.drafting.history import LENGTHS, HistoryRule
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.drafting.slots import SlotDrafter, Slots, start
from draftstore.drafting.sources import IDS, Prefill, Results, SlotSource
from draftstore.errors import DraftstoreError, DraftTreeError, TokenRangeError
from draftstore.recycling.drafter import RecyclingDrafter
from draftstore.stores.rest.store import STRATEGIES, RestDrafter
from draftstore.text.tokenizer import load_tokenizer
from draftstore.trees.batch import DraftBatch
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import RandomTrees, tree_of
from tests.reference import Nodes, SlowText, UnclearError, make_index, nodes_of, tree_from
from tests.unit.drafting.test_drafter import VOCAB, Recorder, padded, store

BAD, WORSE, WORST = 3, 4, 5
"""Tokens at which some drafters fail."""
TOKENS = [*[0, 1, 2, 6, 7] * 6, BAD, WORSE, WORST, VOCAB - 1, SEPARATOR]
RULE = HistoryRule(rows=2, beta=0.3)
LONGEST = 100
"""Maximum tokens of a real output."""
DEAF: Nodes = [(1, -1, 5), (2, 0, 20)]
PREDICTION = [1, 2, 1, 0, 2, 2]


# -- drafters that fail --------------------------------------------------------------------------------------


class Fragile(Recorder):
    """Fails if a context ends badly, or if two contexts end equally."""

    def draft_batch(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, hidden: Any = None
    ) -> DraftBatch:
        lasts = contexts[:, -1].tolist()
        if BAD in lasts or len({*lasts}) < len(lasts):
            raise OSError("gone")
        if WORSE in lasts:
            return DraftBatch.empty(len(lasts) + 1)
        none: Any = None
        return (
            none if WORST in lasts else super().draft_batch(np.maximum(contexts, 0), budget, min_prob, hidden)
        )


class Dense(ContextDrafter):
    """Proposes the token that the state names."""

    context_size, vocab_size, hidden_size = 1, VOCAB, 2

    def draft_batch(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, hidden: Any = None
    ) -> DraftBatch:
        trees = [
            tree_from([(int(token), -1, 9)] if np.isfinite(token) else []) for token in hidden[:, 0].tolist()
        ]
        return DraftBatch.of([(tree.tokens, tree.parents, tree.levels, 0, 0) for tree in trees])


class Deaf(SlotDrafter):
    """Cannot learn a bad token of one text, nor those of any text if one is worse; `left` are the texts that left."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def open_source(self, slots: Slots) -> "DeafSource":
        return DeafSource(self.left)


class DeafSource(SlotSource):
    """The texts of `Deaf`."""

    def __init__(self, left: list[int]) -> None:
        self.left = left

    def leave(self, slot: int) -> None:
        self.left.append(slot)

    def join(self, slot: int, drafter: Any, prefill: Prefill) -> None:
        pass

    def propose(self, slots: NDArray[np.int64], budget: int, min_prob: float) -> DraftBatch:
        tree = tree_from(DEAF[:budget])
        return DraftBatch.of([(tree.tokens, tree.parents, tree.levels, 0, 0)] * len(slots))

    def observe(self, places: NDArray[np.int64], results: Results) -> Mapping[int, Exception]:
        new = {place: results.new(place).tolist() for place in places.tolist()}
        if any(WORSE in ids for ids in new.values()):
            raise OSError("of all")
        return {place: OSError("of one") for place, ids in new.items() if BAD in ids}


class Foreign:
    """A drafter of others, which has sessions alone: of random trees, and invalid ones."""

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "ForeignSession":
        return ForeignSession(np.asarray(prompt_ids).tolist())


class ForeignSession:
    """A text of `Foreign`."""

    needs_candidates = needs_hidden = False

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        last = self.text[-1] if self.text else 0
        if last == BAD:
            raise OSError("gone")
        nothing: Any = None
        odd = {WORSE: tree_from([(1, -1, 5), (1, 5, 9)]), WORST: nothing}
        return odd[last] if last in odd else tree_of(RandomTrees(VOCAB, len(self.text)).paths(budget + 2))

    def observe(self, accepted_ids: ArrayLike, *, hidden: Any = None, **_feedback: Any) -> None:
        assert hidden is None or np.isfinite(hidden).all()
        ids = np.asarray(accepted_ids).tolist()
        if WORST in ids:
            raise OSError("gone")
        self.text += ids


# -- a source alone ------------------------------------------------------------------------------------------


class AloneSession:
    """A source with a session of its own."""

    def __init__(self, session: Session, vocab_size: int) -> None:
        self.session, self.vocab_size = session, vocab_size

    def draft(self, budget: int, min_prob: float) -> Nodes:
        return nodes_of(self.session.propose(budget, min_prob))[:budget]

    def learn(self, ids: Sequence[int], **told: Any) -> None:
        self.session.observe(ids, **told)


class AloneText:
    """A source that drafts for the whole text anew."""

    def __init__(self, drafter: Any, text: Sequence[int], hidden: Any = None) -> None:
        self.drafter, self.text, self.hidden = drafter, list(text), hidden
        self.vocab_size: int = drafter.vocab_size

    def draft(self, budget: int, min_prob: float) -> Nodes:
        if isinstance(self.drafter, RequestDrafter):
            tree = RequestDrafter(VOCAB, self.drafter.rule).session(self.text).propose(budget, min_prob)
        else:
            unknown = np.full(self.drafter.hidden_size, np.nan, np.float16)
            context = np.array([padded(self.text, self.drafter.context_size)], np.int32)
            states = np.array([unknown if self.hidden is None else self.hidden], np.float16)
            [(tree, *_)] = self.drafter.draft(context, budget, min_prob, states)
        return nodes_of(tree)

    def learn(self, ids: Sequence[int], hidden: Any = None, **_told: Any) -> None:
        check_ids(ids, self.vocab_size, parts=True)
        self.text, self.hidden = [*self.text, *ids], hidden


class AloneDeaf:
    """`Deaf` for one text; `warned` says that a text learns a worse token."""

    warned, vocab_size = False, IDS

    def draft(self, budget: int, min_prob: float) -> Nodes:
        return DEAF[:budget]

    def learn(self, ids: Sequence[int], **_told: Any) -> None:
        if BAD in ids or self.warned:
            raise OSError


# -- texts that share slots ----------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text in slots, its oracle, and its last draft."""

    slot: int
    mixture: Mixture
    slow: SlowText
    drafts: list[DraftTree]

    def refuses(self, ids: Sequence[int]) -> bool:
        """Return whether new ids are an error of this text."""
        (first, *_) = self.slow.sources
        limit = IDS if self.slow.mixed else first.vocab_size
        return any(token >= limit or (token < 0 and token != SEPARATOR) for token in ids)


class World:
    """Drafters, texts that share their slots, and an oracle of each."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.drafters: dict[str, Any] = {
            "request": RequestDrafter(VOCAB), "rule": RequestDrafter(VOCAB, RULE), "narrow": RequestDrafter(VOCAB - 1),
            "predicted": RequestDrafter(VOCAB, prediction=PREDICTION), "longest": store("longest"),
            "backoff": store("backoff"), "recycling": RecyclingDrafter(VOCAB), "foreign": Foreign(), "dense": Dense(),
            "fragile": Fragile(), "deaf": Deaf(),
        }  # fmt: skip
        self.lone_recycling = RecyclingDrafter(VOCAB)
        self.slots = Slots()
        self.texts: list[Text] = []

    def ids(self, most: int) -> list[int]:
        return self.random.choices(TOKENS, k=self.random.randint(0, most))

    def outputs(self, rows: int) -> dict[str, Any]:
        """Return what a pass may know of a text: rarely candidates of the wrong shape."""
        count = rows + (self.random.random() < 0.05)
        top = [self.random.choices(range(-1, VOCAB + 1), k=8) for _ in range(count)]
        state = np.array([self.random.random() * VOCAB, 1.0], np.float32)
        return {
            "candidates": np.array(top, np.int32) if self.random.random() < 0.6 else None,
            "hidden": state if self.random.random() < 0.6 else None,
        }

    def join(self) -> None:
        names = self.random.sample([*self.drafters], self.random.choice([1, 1, 2, 3, 4]))
        mixture = Mixture([self.drafters[name] for name in names])
        drafter = self.drafters[names[0]] if self.random.random() < 0.5 and len(names) == 1 else mixture
        prompt, outputs = self.ids(30), self.outputs(1)
        if "narrow" in names and VOCAB - 1 in prompt:
            with pytest.raises(TokenRangeError):
                start(drafter, prompt, slots=self.slots, **outputs)
            return
        slot = start(drafter, prompt, slots=self.slots, **outputs).slot
        sources = [self.alone(name, prompt, **outputs) for name in names]
        self.texts.append(Text(slot, mixture, SlowText(sources, len(names) > 1), []))

    def alone(self, name: str, prompt: list[int], hidden: Any, candidates: Any) -> Any:
        if name == "deaf":
            return AloneDeaf()
        if name == "recycling":
            return AloneSession(self.lone_recycling.session(prompt, candidates=candidates), VOCAB)
        if name == "foreign":
            return AloneSession(ForeignSession(list(prompt)), IDS)
        before = [*prompt[-1 - LENGTHS[-1] : -1], *PREDICTION] if name == "predicted" else []
        return AloneText(self.drafters[name], [*before, *prompt], hidden)

    def some(self) -> list[Text]:
        return self.random.sample(self.texts, self.random.randint(0, len(self.texts)))

    def leave(self, text: Text) -> None:
        self.texts.remove(text)
        self.slots.leave(text.slot)

    def propose(self) -> None:
        asked = [
            (text, self.random.choice([20, 20, 20, 7, 1, 0]), self.random.choice([0.0, 0.0, 0.05, 0.3, 1.1]))
            for text in self.some()
        ]
        expected = [self.expected(*each) for each in asked]
        lost = [text for (text, *_), each in zip(asked, expected, strict=True) if each == "lost"]
        if lost:
            with pytest.raises(Exception):  # noqa: B017, PT011 (of any source)
                self.drafts(asked)
        for text in lost:
            with pytest.raises(Exception):  # noqa: B017, PT011
                self.drafts([(text, 9, 0.0)])
            self.leave(text)
        asked = [each for each in asked if each[0] not in lost]
        known = [nodes for nodes in expected if nodes != "lost"]
        for (text, *_), tree, nodes in zip(asked, self.drafts(asked), known, strict=True):
            text.drafts[:] = [tree]
            assert nodes in (nodes_of(tree), "unclear")

    def drafts(self, asked: Sequence[tuple[Text, int, float]]) -> list[DraftTree]:
        return self.slots.propose(
            [text.slot for text, _, _ in asked],
            [budget for _, budget, _ in asked],
            [min_prob for _, _, min_prob in asked],
        ).trees()

    def expected(self, text: Text, budget: int, min_prob: float) -> Any:
        try:
            return text.slow.propose(budget, min_prob, check_budget(budget, min_prob))
        except UnclearError:
            return "unclear"
        except Exception:  # noqa: BLE001 (of its only source)
            return "lost"

    def observe(self) -> None:
        texts, news, told = self.some(), [], []
        for text in texts:
            tree = text.drafts.pop() if text.drafts else None
            path: list[int] = []
            if tree is not None:
                path = tree.tokens[tree.path(self.random.randint(-1, len(tree) - 1))].tolist()
            wrong = self.random.choice([*[0] * 40, VOCAB, -5])
            news.append([*path, self.random.choice(TOKENS)] if path else self.ids(5))
            if wrong:
                news[-1].append(wrong)
            told.append(
                {"tree": tree if path else None} | self.outputs(len(tree) + 1 if path and tree else 1)
            )
        refused = [text.refuses(ids) for text, ids in zip(texts, news, strict=True)]
        errors = self.learn(texts, news, told)
        warned = any(
            WORSE in ids and not wrong and any(isinstance(source, AloneDeaf) for source in text.slow.sources)
            for text, ids, wrong in zip(texts, news, refused, strict=True)
        )
        for place, (text, ids, wrong) in enumerate(zip(texts, news, refused, strict=True)):
            if wrong:
                assert isinstance(errors.pop(place), TokenRangeError)
                continue
            for source in text.slow.sources:
                if isinstance(source, AloneDeaf):
                    source.warned = warned
            try:
                text.slow.observe(ids, **told[place])
            except Exception:  # noqa: BLE001 (of its only source)
                assert errors.pop(place)
                self.leave(text)
                continue
            assert [*map(tuple, self.slots.outcomes([text.slot]).of(0))] == text.slow.outcomes
        assert errors == {}

    def learn(
        self, texts: Sequence[Text], news: Sequence[list[int]], told: Sequence[Any]
    ) -> dict[int, Exception]:
        states = [
            np.full(2, np.nan, np.float32) if each["hidden"] is None else each["hidden"] for each in told
        ]
        return self.slots.observe(
            [text.slot for text in texts],
            np.array([token for ids in news for token in ids], np.int32),
            np.cumsum([len(ids) for ids in news], dtype=np.int64),
            trees=[each["tree"] for each in told],
            candidates=[each["candidates"] for each in told],
            hidden=np.array(states) if states else None,
        )

    def check(self) -> None:
        assert len(self.slots) == len(self.texts)
        for text in self.texts:
            if text.slow.mixed:
                failed = [int(source is None) for source in text.slow.sources]
                assert text.mixture.faults.counts == failed
                found = self.slots.seen[text.slot, : len(failed)]
                assert found == pytest.approx(np.array(text.slow.seen), rel=1e-6)


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_each_text_gets_what_it_gets_alone(random: Random, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "SPARE", 3)
        world = World(random)
        for _ in range(steps):
            step = random.choice(["join", "join", "propose", "propose", "observe", "observe", "leave"])
            if step == "leave" and world.texts:
                world.leave(random.choice(world.texts))
            elif step != "leave":
                getattr(world, step)()
            world.check()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_store_is_asked_once(mixed: bool) -> None:
    recorder = Recorder()
    drafter: Any = Mixture([RequestDrafter(VOCAB), recorder]) if mixed else recorder
    slots = Slots()
    places = [start(drafter, [number, number + 1], slots=slots).slot for number in range(5)]
    slots.propose(places, [16] * 5, [0.0] * 5)
    slots.propose(places, [16, 0, 16, 8, 16], [0.0] * 5)
    assert [len(contexts) for contexts, _, _ in recorder.calls] == [5, 3, 1]


class Renamed(Recorder):
    """A drafter of a release that may become another."""

    @property
    def source(self) -> tuple[str, int]:
        return "release", self.hidden_size


def test_texts_with_and_without_states_are_asked_about_apart() -> None:
    """A release of the lookup service may become known between two texts."""
    early, late, slots = Renamed(), Renamed(hidden_size=2), Slots()
    texts = [start(early, [1], slots=slots), start(late, [2], slots=slots, hidden=np.ones(2, np.float32))]
    assert [text.needs_hidden for text in texts] == [False, True]
    slots.propose([text.slot for text in texts], [8, 8], [0.0, 0.0])
    assert [each.calls[0][0][0][-1] for each in (early, late)] == [1, 2]
    assert early.hidden is None
    assert late.hidden is not None


def test_a_text_that_is_refused_leaves_no_trace() -> None:
    slots = Slots()
    for wrong in ([VOCAB], [1, -1]):
        with pytest.raises(TokenRangeError):
            start(Mixture([RequestDrafter(VOCAB), Dense()]), wrong, slots=slots)
    with pytest.raises(DraftstoreError, match="hidden states of shape"):
        start(Mixture([RequestDrafter(VOCAB), Dense()]), [1], slots=slots, hidden=np.zeros(3, np.float32))
    assert len(slots) == 0
    assert start(RequestDrafter(VOCAB), [1], slots=slots).slot == 0


def test_a_failure_is_counted_once_for_each_text() -> None:
    slots, deaf = Slots(), Deaf()
    mixture = Mixture([RequestDrafter(VOCAB), Fragile(), deaf])
    places = [start(mixture, [place, BAD], slots=slots).slot for place in range(4)]
    for _ in range(2):
        slots.propose(places[:3], [9] * 3, [0.0] * 3)
    assert mixture.faults.counts == [0, 3, 0]
    for _ in range(2):
        new = np.array([1, BAD, 1, BAD], np.int32)
        assert slots.observe(places, new, np.arange(1, 5)) == {}
    assert mixture.faults.counts == [0, 3, 2]
    slots.observe(places, np.array([WORSE], np.int32), np.ones(4, np.int64))
    assert mixture.faults.counts == [0, 3, 4], "all that could have learned it"
    for place in places:
        slots.leave(place)
    assert sorted(deaf.left) == places


def test_a_draft_does_not_outlive_its_source() -> None:
    session = Mixture([RequestDrafter(VOCAB), Fragile()]).session([7])
    for last, reason in ((BAD, ""), (7, "failed"), (7, "failed")):
        session.propose(9)
        assert session.slots.outcomes([session.slot]).of(0)[1] == (int(not reason), 0, reason)
        session.observe([6, last])


class Broken(Recorder):
    """Proposes what is not a tree, in at most 8 nodes."""

    wrong: Any = ()

    def draft_batch(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, hidden: Any = None
    ) -> DraftBatch:
        return DraftBatch.of([([1, 2], [-1, 0], [0, 1], 0, 0)] * len(contexts))._replace(**self.wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"sizes": np.array([40], np.int32)}, "40 nodes of 2"),
        ({"sizes": np.array([-1], np.int32)}, "-1 nodes of 2"),
        ({"sizes": np.array([2, 2], np.int32)}, "not a tree"),
        ({"parents": np.array([[-1, 30_000]], np.int16)}, "node 1 with token 2 and parent 30000"),
        ({"parents": np.array([[-2, 0]], np.int16)}, "node 0 with token 1 and parent -2"),
        ({"tokens": np.array([[-7, 1]], np.int32)}, "node 0 with token -7"),
        ({"levels": np.zeros((1, 3), np.uint8)}, "not a tree"),
    ],
)
def test_kernels_never_see_what_is_not_a_tree(wrong: Any, why: str) -> None:
    broken = Broken()
    broken.wrong = wrong
    with pytest.raises(DraftTreeError, match=why):
        broken.session([1]).propose(8)
    mixture = Mixture([RequestDrafter(VOCAB), broken])
    text = [1, 2, 1]
    assert mixture.session(text).propose(8) == RequestDrafter(VOCAB).session(text).propose(8)
    assert mixture.faults.counts == [0, 1]


def test_errors_have_the_places_of_their_texts() -> None:
    slots = Slots()
    drafters = RequestDrafter(VOCAB), Deaf(), Foreign(), RequestDrafter(VOCAB), None, Dense()
    places = [start(drafter, [0, 1, 0], slots=slots).slot for drafter in drafters]
    slots.observe(places[5:], np.zeros(1, np.int32), np.ones(1, np.int64), hidden=np.full((1, 2), 8.0))
    new = np.array([1, VOCAB, BAD, 7, WORST, 1, VOCAB, VOCAB], np.int32)
    errors = slots.observe(places, new, np.array([2, 3, 5, 6, 7, 8]), hidden=np.full((6, 2), 4.0))
    wrong = {0: TokenRangeError, 1: OSError, 2: OSError, 5: TokenRangeError}
    assert {place: type(error) for place, error in errors.items()} == wrong
    for place, token in {0: 1, 3: 0, 5: 8}.items():
        (tree,) = slots.propose([places[place]], [1], [0.0]).trees()
        assert tree.tokens.tolist() == [token], "only the second has learned what came"


def test_slots_forget_a_drafter_without_texts() -> None:
    slots, drafter = Slots(), Recorder()
    slots.leave(start(drafter, [1], slots=slots).slot)
    known = weakref.ref(drafter)
    del drafter
    assert known() is None


def test_no_texts_are_no_work() -> None:
    slots = Slots()
    assert slots.propose([], [], []).trees() == []
    assert slots.observe([], np.empty(0, np.int32), np.empty(0, np.int64)) == {}


# -- real texts ----------------------------------------------------------------------------------------------


def replayed(drafter: Drafter, recordings: Sequence[Recording], most: int) -> list[list[bytes]]:
    """Return all drafts of recordings, of which the next joins when one has ended."""
    drafts: list[list[bytes]] = [[] for _ in recordings]
    waiting, running, slots = [*range(len(recordings))][::-1], dict[int, tuple[int, int]](), Slots()
    while waiting or running:
        while waiting and len(running) < most:
            text = recordings[waiting[-1]]
            slot = start(drafter, np.concatenate([text.prompt, text.output[:1]]), slots=slots).slot
            running[waiting.pop()] = slot, 1
        places = [slot for slot, _ in running.values()]
        new = []
        budgets = [16 + len(recordings[number].prompt) % 3 for number in running]
        proposed = slots.propose(places, budgets, [0.0] * len(running))
        for (number, (slot, done)), tree in zip([*running.items()], proposed.trees(), strict=True):
            drafts[number].append(tree.to_bytes())
            coming = recordings[number].output[done:LONGEST]
            new.append(coming[: len(tree.accepted(coming)) + 1])
            running[number] = slot, done + len(new[-1])
        slots.observe(places, np.concatenate(new), np.cumsum([len(ids) for ids in new]))
        for number, (slot, done) in [*running.items()]:
            if done >= min(LONGEST, len(recordings[number].output)):
                slots.leave(slot)
                del running[number]
    return drafts


def test_real_texts_get_what_they_get_alone(data: Path) -> None:
    tokenizer = load_tokenizer(data / "tokenizers" / "llama2")
    recordings = [
        recording
        for name, model in [("alpaca_eval", "vicuna-7b-v1.5"), ("agent_tools", None), ("mbpp", None)]
        for recording in read_recordings(
            data / "replays" / f"{name}.jsonl.zst", tokenizer, model=model, limit=25
        )
        if len(recording.output) > 1
    ]
    index = make_index([[recording.output.tolist() for recording in recordings[::2]]], tokenizer.vocab_size)
    drafters = RequestDrafter(tokenizer.vocab_size), RestDrafter(index, STRATEGIES["backoff"])
    alone = [replayed(Mixture(drafters), [recording], 1)[0] for recording in recordings]
    assert sum(len(tree) > 1 for drafts in alone for tree in drafts) > 1000
    for most in (7, 64):
        assert replayed(Mixture(drafters), recordings, most) == alone
