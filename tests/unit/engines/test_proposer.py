"""Drafts for an engine's requests: the same as from one session each, whatever joins, leaves, returns or fails."""

import logging
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.assembly.drafter import assemble
from draftstore.assembly.sources import Sources
from draftstore.drafting.request import RequestSource
from draftstore.engines.config import EngineConfig
from draftstore.engines.proposer import Proposer
from draftstore.errors import DraftstoreError, EngineError
from draftstore.live.store import LiveTarget
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import DraftTree
from tests.fakes.lookups import contexts_of
from tests.reference import paths_of

VOCAB = 50
NOBODY = TokenizerIdentity("nobody", "0" * 64)


class Asked(NamedTuple):
    """A request for a draft: its key, its whole text, its budget and the options of `Proposer.start`."""

    key: Hashable
    ids: Any
    budget: int
    options: dict[str, Any]


def asked(key: Hashable, ids: Any, budget: int = 1 << 40, **options: Any) -> Asked:
    return Asked(key, ids, budget, options)


class Drafts:
    """A proposer for an engine with keys of requests."""

    def __init__(self, config: EngineConfig | None = None, **settings: Any) -> None:
        settings = {"engine": "test", "vocab_size": VOCAB, "tokenizer": NOBODY, **settings}
        self.made = Proposer(EngineConfig(adaptive=False) if config is None else config, **settings)
        self.known = dict[Hashable, int]()

    def propose(self, requests: Sequence[Asked]) -> list[DraftTree]:
        new, rows = list[int](), []
        for key, ids, budget, options in requests:
            if key in self.known:
                new.extend(ids[len(self.made.texts.ids(self.known[key])) :])
            else:
                self.known[key] = self.made.start(ids, **options)
            rows.append((self.known[key], len(new), budget))
        slots, stops, budgets = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        trees = self.made.propose(slots, np.array(new, np.int32), stops, budgets).trees()
        for key, slot in list(self.known.items()):
            if slot in self.made.forgotten:
                del self.known[key]
        return trees

    def forget(self, keys: Sequence[Hashable]) -> None:
        self.made.forget([self.known.pop(key) for key in keys])


steps = st.lists(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=4))), max_size=12)


@given(steps)
def test_every_request_gets_what_a_session_of_its_own_proposes(
    history: list[list[tuple[int, list[int]]]],
) -> None:
    drafts = Drafts()
    texts: dict[int, list[int]] = {}
    with assemble(Sources(request=True), vocab_size=VOCAB, tokenizer=NOBODY) as alone:
        for step in history:
            for key, new in dict(step).items():
                texts[key] = [*texts.get(key, [1, 2, 1]), *new]
            keys = list(dict(step))
            trees = drafts.propose([asked(key, texts[key]) for key in keys])
            assert trees == [alone.session(texts[key]).propose(drafts.made.budget) for key in keys]


def test_what_was_made_of_a_draft_is_seen_from_the_text() -> None:
    drafts = Drafts(EngineConfig(adaptive=False, budget=2))
    (tree,) = drafts.propose([asked(0, [1, 2, 3, 4, 1, 2])])
    assert tree.tokens.tolist() == [3, 4]
    drafts.propose([asked(0, [1, 2, 3, 4, 1, 2, 3, 4, 9])])
    drafts.propose([asked(0, [1, 2, 3, 4, 1, 2, 3, 4, 9, 9])])
    figures = drafts.made.figures
    assert [figures.total(name) for name in ("steps", "drafted_tokens", "accepted_tokens")] == [2, 2, 2]
    assert figures.by_label("accepted_tokens_per_position") == {"0": 1, "1": 1}
    assert figures.by_label("source_drafted_tokens") == {"request": 2}
    assert figures.by_label("source_matched_tokens") == {"request": 2}
    drafts.propose([asked(0, [1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 8], budget=0)])
    drafts.propose([asked(0, [1, 2, 3, 4, 1, 2, 3, 4, 9, 9, 8, 7])])
    drafts.propose([asked(1, [1, 2], corpus="acme")])
    assert figures.by_label("source_empty_drafts") == {
        "request no_match": 1,
        "request budget": 1,
        " unknown_corpus": 1,
    }


def test_as_many_nodes_of_whole_drafts_are_verified_as_pay() -> None:
    whole, adaptive = Drafts(chain=4), Drafts(EngineConfig(), chain=4)
    load, now, text = adaptive.made.load, 0.0, [1, 2, 3, 4] * 3
    assert load is not None
    load.clock = lambda: now
    verified: dict[float, list[int]] = {0.0: [], 2.0: []}  # by the cost of a node
    for cost, nodes in verified.items():
        for _ in range(60):
            (expected,), (found,) = (drafts.propose([asked(0, text)]) for drafts in (whole, adaptive))
            assert found == expected.prefix(len(found))
            now += 0.01 * (1 + cost * len(found))
            text = [*text, *([1, 2, 3, 4] * 3)[len(text) % 4 :][: len(found) + 1]]
            nodes.append(len(found))
    assert np.mean(verified[0.0][-20:]) > 3.5
    assert np.mean(verified[2.0][-20:]) < 0.5
    figures = adaptive.made.figures
    assert figures.total("accepted_tokens") == figures.total("drafted_tokens") - verified[2.0][-1]
    assert figures.by_label("accepted_tokens_per_position").keys() == {"0", "1", "2", "3"}
    collected = {sample.name: sample.value for metric in figures.collect() for sample in metric.samples}
    assert collected["draftstore_engine_passes_total"] == 120
    assert 0 < collected["draftstore_engine_passes_without_drafts_total"] < 60
    assert (
        collected["draftstore_engine_plain_seconds_total"]
        > collected["draftstore_engine_drafted_seconds_total"]
    )
    assert collected["draftstore_engine_pass_seconds"] > 0


@pytest.mark.parametrize("chain", [None, 4])
@pytest.mark.parametrize("seed", range(4))
def test_counts_are_those_of_the_nodes_that_were_verified(chain: int | None, seed: int) -> None:
    rng, drafts = np.random.default_rng(seed), Drafts(EngineConfig(budget=6), chain=chain)
    load, now = drafts.made.load, 0.0
    assert load is not None
    load.clock = lambda: now
    texts, last, counts = dict[int, list[int]](), dict[int, DraftTree](), np.zeros(2, int)
    for step in range(120):
        now += 0.001 + 0.001 * rng.random() * len(texts)
        if rng.random() < 0.2:
            texts[step] = rng.integers(0, 2, rng.integers(1, 30)).tolist()
        for key in [key for key in texts if rng.random() < 0.02]:
            texts.pop(key)
            if last.pop(key, None) is not None:
                drafts.forget([key])
        batch = [key for key in texts if rng.random() < 0.9]
        for key in batch:
            if (tree := last.get(key)) is not None:
                nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.levels.tolist(), strict=True)
                paths = [(), *paths_of([*nodes])]
                new = [*paths[rng.integers(len(paths))], int(rng.integers(0, 2))]
                counts += [len(tree), max(size for size in range(len(new)) if tuple(new[:size]) in paths)]
                texts[key] += new
        trees = drafts.propose([asked(key, texts[key], budget=int(rng.integers(0, 8))) for key in batch])
        last |= dict(zip(batch, trees, strict=True))
    figures = drafts.made.figures
    assert [figures.total("drafted_tokens"), figures.total("accepted_tokens")] == counts.tolist()
    assert 0 < counts[1] < counts[0]
    assert figures.failures == 0


def test_a_budget_of_zero_drafts_nothing() -> None:
    drafts = Drafts(EngineConfig(budget=0))
    for text in ([1, 2, 1], [1, 2, 1, 2], [1, 2, 1, 2, 1]):
        assert len(drafts.propose([asked(0, text)])[0]) == 0


def test_budgets_of_requests_cut_their_drafts() -> None:
    drafts = Drafts(EngineConfig(adaptive=False, budget=3))
    trees = drafts.propose([asked(key, [1, 2, 3, 4, 1, 2], budget=key - 1) for key in range(7)])
    assert [len(tree) for tree in trees] == [0, 0, 1, 2, 3, 3, 3]


def test_long_texts_that_are_no_longer_asked_for_are_soon_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftstore.engines.proposer.MAX_REMEMBERED_TOKENS", 1000)
    drafts = Drafts()
    for step in range(40):
        drafts.propose([asked("stays", [1] * (2000 + step)), asked(step, [step] * 200)])
        assert len(drafts.made) <= 1 + 5 + 8
    assert drafts.propose([asked(38, [38] * 200)])[0].tokens[:1].tolist() == [38]


def test_ids_outside_the_vocabulary_such_as_images_separate_what_is_before_from_what_follows() -> None:
    image = VOCAB + 3
    drafts = Drafts(EngineConfig(adaptive=False, live=LiveTarget("team")))
    prompt = [1, 2, 3, 4, image, -7, 9, 1, 2]
    predicted = lambda: np.array([2, 7, 8, image, 5, 6])  # noqa: E731
    (tree,) = drafts.propose([asked(0, prompt)])
    assert tree.tokens[:2].tolist() == [3, 4]
    (tree,) = drafts.propose([asked(0, [*prompt, 3, 4, 9])])
    assert tree.tokens[0] == 1
    (tree,) = drafts.propose([asked(1, [*prompt[:-1], 2], prediction=predicted)])
    assert {7, 8} <= {*tree.tokens.tolist()}
    assert max(tree.tokens) < VOCAB
    drafts.forget([0, 1])
    assert drafts.made.figures.failures == 0
    (tree,) = drafts.propose([asked(2, [7, 9, 1])])
    assert tree.tokens[:3].tolist() == [2, 3, 4], "from the live store, with what followed the image"


def test_no_failure_leaves_it(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = Drafts()
    assert not len(drafts.propose([asked(0, [1, 1], corpus="acme"), asked(1, [1, 2, 1])])[0])
    assert "no corpus 'acme'" in caplog.text
    for size in (2, 3):
        lost = asked(0, [1, 1, *[1] * size], corpus="acme")
        first, second = drafts.propose([lost, asked(1, [1, 2, 1] + [2] * size)])
        assert len(first) == 0 < len(second)
    assert drafts.made.figures.failures == 1

    broken = drafts.known[1]
    propose, observe = RequestSource.propose, RequestSource.observe

    def draft(source: RequestSource, slots: Any, budget: int, min_prob: float) -> Any:
        if broken in slots.tolist():
            raise MemoryError
        return propose(source, slots, budget, min_prob)

    def learn(source: RequestSource, places: Any, results: Any) -> Any:
        observe(source, places, results)
        return {place: MemoryError() for place in places.tolist() if results.slots[place] == broken}

    monkeypatch.setattr(RequestSource, "propose", draft)
    trees = drafts.propose([asked(1, [1, 2, 1, 2, 2, 2, 2]), asked(2, [1, 2, 1]), asked(3, [1, 1])])
    assert [len(tree) > 0 for tree in trees] == [False, True, True]
    assert drafts.made.figures.failures == 2
    monkeypatch.setattr(RequestSource, "propose", propose)
    monkeypatch.setattr(RequestSource, "observe", learn)
    broken = drafts.known[3]
    for size in (2, 3):
        texts = [
            asked(key, [*begin, *[1] * size])
            for key, begin in ((1, [1, 2, 1, 2, 2, 2, 2]), (2, [1, 2, 1]), (3, [1, 1]))
        ]
        assert [len(tree) > 0 for tree in drafts.propose(texts)] == [False, True, False]
    assert drafts.made.figures.failures == 3
    assert len(caplog.records) == 1  # one a minute


@pytest.mark.parametrize(
    "strange",
    [
        {"ids": None}, {"ids": [2**40]}, {"ids": "text"}, {"corpus": []},
        {"corpus": "a\nERROR forged" + "x" * 10_000}, {"budget": -1 << 62}, {"prediction": lambda: 1 / 0, "budget": 0},
    ],
)  # fmt: skip
def test_whatever_is_asked_nothing_is_raised(
    strange: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = Drafts().made
    options: dict[str, Any] = {"ids": [1, 2, 1], "budget": 4} | strange
    budget = options.pop("budget")
    slots = np.array([made.start(**options), made.start([1, 2, 1])])
    for stops in ([0, 0], [1, 2]):
        batch = made.propose(slots, np.array([1] * stops[1]), np.array(stops), np.array([budget, 4]))
        assert batch.sizes[0] == 0 < batch.sizes[1]
    assert all(len(message) < 500 and "\n" not in message for message in caplog.messages)


def test_a_step_that_fails_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = Drafts()
    monkeypatch.setattr(drafts.made, "_draft", None)
    assert [len(tree) for tree in drafts.propose([asked(1, [1, 2, 1]), asked(2, [1, 1])])] == [0, 0]
    assert drafts.made.figures.failures == 1


def test_corpora_are_kept_apart(small_store: Path, small_tokenizer: TextTokenizer) -> None:
    config = EngineConfig(
        adaptive=False, request=False, corpora={"acme": Sources(stores=(small_store,), request=False)}
    )
    drafts = Drafts(config, vocab_size=small_tokenizer.vocab_size, tokenizer=small_tokenizer.identity)
    texts = [row[row >= 0] for row in contexts_of(small_store, 20)]
    for corpus, drafted in (("acme", True), ("", False), ("another", False), ("acme", True)):
        trees = drafts.propose([asked((corpus, key), text, corpus=corpus) for key, text in enumerate(texts)])
        assert any(len(tree) for tree in trees) is drafted
    assert drafts.made.figures.failures == len(texts)
    assert drafts.made.sources == "drafts from nothing; corpus acme: rest:small"
    drafts.made.close()


def test_what_needs_the_models_states_is_refused_at_the_start(
    small_dense: Path, small_tokenizer: TextTokenizer
) -> None:
    about = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    with pytest.raises(EngineError, match="drafts from hidden states, which engines do not expose"):
        Drafts(EngineConfig(adaptive=False, stores=(small_dense,), request=False), **about)
    with pytest.raises(EngineError, match="drafts from candidates of the model"):
        Drafts(EngineConfig(adaptive=False, recycling=True, request=False))


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_answers_that_ended_draft_for_the_next_request_unless_it_wants_none() -> None:
    config = EngineConfig(adaptive=False, request=False, live=LiveTarget("team"))
    drafts = Drafts(config)

    def drafted(key: int, ids: list[int], live: bool = True) -> list[int]:
        found: list[int] = drafts.propose([asked(key, ids, live=live)])[0].tokens.tolist()
        return found

    answer = [*range(10, 30)]
    assert drafted(1, [1, 2, 10]) == []
    drafted(1, [1, 2, *answer])
    drafts.made.complete(drafts.known[1], 2, [*answer, 30])  # the engine's last step
    drafts.forget([1])
    assert drafted(2, [3, 10, 11])[:3] == [12, 13, 14]
    assert drafted(3, [3, 28, 29])[:1] == [30]
    assert drafted(4, [2, 10], live=False) == []
    drafts.forget([4])
    drafted(5, [7, 7, 40, 41, 42], live=False)
    drafts.forget([5])
    assert drafted(6, [7, 40, 41]) == []
    drafted(7, [5, 5, 45])
    drafted(7, [5, 5, 45, 46, 47])
    for step in range(3):  # 7 is in no step any more
        drafted(8, [step])
    assert drafted(9, [5, 45])[:2] == [46, 47]
    drafts.made.close()


def test_answers_to_the_same_prompt_are_recalled_even_by_a_text_that_comes_back() -> None:
    config = EngineConfig(request=False, live=LiveTarget("rollouts"), recall=16, adaptive=False)
    drafts, prompt, answer = Drafts(config), [1, 2, 3], [*range(10, 30)]
    drafts.propose([asked(0, [*prompt, 10]), asked("other prompt", [3, 2, 1, 10])])
    drafts.propose([asked(0, [*prompt, *answer])])
    drafts.forget([0])  # as an engine does that preempts it
    drafts.propose([asked("back", [*prompt, *answer, 30], budget=0)])
    drafts.propose([asked("back", [*prompt, *answer, 30, 31, 32, 33])])
    drafts.forget(["back"])

    def recalled(key: str, *ids: int) -> int:
        """Return how many of the next ids recall drafts, once the next step has counted them."""
        before = drafts.made.figures.by_label("source_matched_tokens").get("recall:rollouts", 0)
        drafts.propose([asked(key, ids[:4])])
        drafts.propose([asked(key, ids)])
        return drafts.made.figures.by_label("source_matched_tokens").get("recall:rollouts", 0) - before

    assert recalled("same", *prompt, 10, 11, 12, 13) == 3
    assert recalled("again", *prompt, 30, 31, 32, 33) == 3, "what followed the pause answers the same prompt"
    assert recalled("another", 1, 2, 4, 10, 11, 12, 13) == 0


def test_recall_needs_a_live_store() -> None:
    with pytest.raises(DraftstoreError, match="answers are recalled from a live store"):
        Drafts(EngineConfig(recall=2))
