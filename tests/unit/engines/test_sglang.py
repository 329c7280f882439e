"""The plug-in of SGLang, with doubles of its worker, requests and scheduler: no answer differs from a plain one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.assembly.sources import Sources
from draftstore.drafting.request import RequestDrafter
from draftstore.engines.config import EngineConfig
from draftstore.engines.proposer import Proposer
from draftstore.engines.sglang import BatchDrafts, StoreDrafts, settle
from draftstore.errors import EngineError, TokenizerError
from draftstore.live.log import read_since, segments
from draftstore.live.store import LiveTarget
from draftstore.storage.manifest import TokenizerIdentity
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.batch import DraftBatch, rows_and_mask
from tests.fakes.sglang_engine import Accepted, Batch, Engine, NgramWorker, Request, plain, server_args

VOCAB, ROWS = 50, 6
NOBODY = TokenizerIdentity("nobody", "0" * 64)
ALONE = SimpleNamespace(world_size=1, rank_in_group=0)


def says(text: Sequence[int]) -> int:
    """Answer as a model that repeats itself now and then."""
    return (text[-1] * 3 + (text[-2] if len(text) > 1 else 1) + len(text) % 7 // 5) % 5


class Worker(StoreDrafts, NgramWorker):
    def _tensor_parallel(self) -> Any:
        return ALONE


def drafts(config: EngineConfig | None = None, rows: int = ROWS, **about: Any) -> BatchDrafts:
    about = {"vocab_size": VOCAB, "tokenizer": NOBODY, **about}
    return BatchDrafts(
        Proposer(config or EngineConfig(adaptive=False, budget=rows - 1), engine="sglang", **about), rows
    )


@pytest.fixture(scope="module")
def shared() -> BatchDrafts:
    """Return drafts for many short histories in turn, whose requests have the same ids."""
    return drafts()


def worker(*, overlap: bool = True, corpus: BatchDrafts | None = None) -> Worker:
    made = Worker.__new__(Worker)
    args = server_args(
        disable_overlap_schedule=not overlap, speculative_num_draft_tokens=ROWS, speculative_eagle_topk=10
    )
    NgramWorker.__init__(made, args, 0, 0, SimpleNamespace(says=says))
    made._ranks, made.ngram_corpus = ALONE, drafts() if corpus is None else corpus
    return made


prompts = st.lists(st.integers(0, 4), min_size=1, max_size=8)
moves = st.lists(
    st.sampled_from(["join", "step", "step", "step", "put back", "return", "flush"]), max_size=40
)


@given(
    overlap=st.booleans(),
    texts=st.lists(prompts, min_size=1, max_size=5),
    history=moves,
    data=st.data(),
)
def test_every_answer_is_the_plain_one(
    shared: BatchDrafts, overlap: bool, texts: list[list[int]], history: list[str], data: st.DataObject
) -> None:
    engine = Engine(worker(overlap=overlap, corpus=shared))
    requests = [Request(f"r{place}", prompt) for place, prompt in enumerate(texts)]
    waiting, away = list(requests), list[Request]()
    for move in [*history, *["return", "join"] * len(requests)]:
        if move == "join" and waiting:
            engine.join(waiting.pop())
        elif move == "put back" and engine.running:
            away.append(data.draw(st.sampled_from(engine.running)))
            engine.leave(away[-1])
        elif move == "return" and away:
            engine.join(away.pop())
        elif move == "flush":
            engine.worker.clear_cache_pool()
        else:
            engine.step()
    while engine.running:
        engine.step()
    for request in requests:
        answer = request.output_ids.tolist()
        assert answer == plain(request.origin_input_ids_unpadded, says, len(answer))
        assert len(answer) >= engine.longest
    assert engine.worker.ngram_corpus.proposer.figures.failures == 0


@given(
    texts=st.lists(prompts, min_size=1, max_size=4),
    later=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=8),
)
def test_drafts_are_those_of_a_session_for_each_text(
    shared: BatchDrafts, texts: list[list[int]], later: list[list[int]]
) -> None:
    requests = [Request(f"r{place}", prompt) for place, prompt in enumerate(texts)]
    alone = RequestDrafter(VOCAB)
    for new in later:
        rotated = [new[place:] + new[:place] for place in range(len(requests))]
        tokens, mask = shared.draft(requests, rotated)  # accepted, but not in the outputs yet
        whole = [
            [*each.origin_input_ids_unpadded, *each.output_ids, *more]
            for each, more in zip(requests, rotated, strict=True)
        ]
        trees = [alone.session(text).propose(ROWS - 1) for text in whole]
        batch = DraftBatch.of([(tree.tokens, tree.parents, tree.levels, 0, 0) for tree in trees])
        expected = rows_and_mask(batch, [text[-1] for text in whole], ROWS)
        assert (tokens.tobytes(), mask.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())
        for each, more in zip(requests, rotated, strict=True):
            each.output_ids.extend(more)


def test_requests_that_left_are_forgotten() -> None:
    engine = Engine(worker())
    for place in range(6):
        engine.join(Request(f"r{place}", [1, place % 4]))
        engine.step()
    while engine.running:
        engine.step()
    engine.join(Request("last", [1]))
    engine.step()
    corpus = engine.worker.ngram_corpus
    assert len(corpus) == len(corpus.proposer) == 1
    engine.worker.clear_cache_pool()
    assert len(corpus) == len(corpus.proposer) == 0
    assert corpus.list_external_corpora() == {}


@pytest.mark.parametrize("overlap", [True, False])
def test_an_answer_is_remembered_when_it_ends(overlap: bool, tmp_path: Path) -> None:
    config = EngineConfig(adaptive=False, live=LiveTarget("team", tmp_path), budget=ROWS - 1)
    engine = Engine(worker(overlap=overlap, corpus=drafts(config)))
    engine.join(request := Request("one", [1, 2]))
    while engine.running:
        engine.step()
    [document] = read_since(segments(tmp_path)[0])[0]
    assert document.ids.tolist() == [1, 2, *request.output_ids]


def test_a_request_turns_drafts_off_or_takes_fewer() -> None:
    def nodes(params: Any) -> int:
        corpus = drafts()
        request = Request("one", [1, 2, 3, 4, 1], params)
        corpus.draft([request], [[]])
        request.output_ids.append(2)
        corpus.draft([request], [[]])
        return corpus.proposer.figures.total("drafted_tokens")

    assert (
        nodes(None)
        == nodes({"draftstore": {}})
        == nodes({"other": 1})
        == nodes({"draftstore": {"budget": 99}})
        == nodes({"draftstore": {"budget": 10**30}})
    )
    assert nodes({"draftstore": {"budget": 1}}) == 1 < nodes(None)
    assert nodes({"draftstore": {"budget": 0}}) == nodes({"draftstore": {"budget": -(10**30)}}) == 0
    assert nodes({"draftstore": "off"}) == nodes({"draftstore": {"corpus": "unknown"}}) == 0


def test_a_prediction_drafts_for_its_request_alone(small_tokenizer: TextTokenizer) -> None:
    text = "1234567890"
    answer = small_tokenizer.encode(text, bos=False).tolist()

    def drafted(**wishes: Any) -> list[int]:
        request = Request("one", [answer[-1], answer[0]], {"draftstore": wishes})
        request.tokenizer = SimpleNamespace(
            encode=lambda given, add_special_tokens: small_tokenizer.encode(
                given, bos=add_special_tokens
            ).tolist()
        )
        tokens, _ = drafts(vocab_size=small_tokenizer.vocab_size).draft([request], [[]])
        found: list[int] = tokens.tolist()[1:]
        return found

    assert drafted() == [answer[0]] * (ROWS - 1)
    assert drafted(prediction=text) == drafted(prediction=answer) == answer[1:ROWS]
    assert drafted(prediction=7) == drafted(prediction=[-1]) == drafted()


def test_without_overlap_and_with_grammars_the_outputs_are_whole() -> None:
    accepted = Accepted(np.array([4, 0, 0, 0, 0, 0]), np.array([1]))
    for overlap, grammar, row in ((True, False, 4), (True, True, 2), (False, False, 2)):
        batch = Batch([Request("one", [1, 2])], accepted if overlap else None, grammar=grammar)
        assert worker(overlap=overlap)._prepare_draft_tokens(batch)[0][0] == row


@pytest.fixture(scope="module")
def tenants(
    small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BatchDrafts, dict[str, list[int]]]]:
    """Return drafts from a store for each tenant, and its text: one has digits alone, the other capital letters."""
    folder, texts, corpora = tmp_path_factory.mktemp("tenants"), {}, {}
    for name, text in (("digits", "12312412351246" * 3), ("letters", "ABCABDABCEABDF" * 3)):
        corpus = folder / f"{name}.jsonl"
        corpus.write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
        build_rest(RestOptions(corpus=(corpus,), name=name), small_tokenizer, folder / name, workers=1)
        corpora[name] = Sources(stores=(folder / name,), request=True)
        texts[name] = small_tokenizer.encode(text, bos=False).tolist()
    about: dict[str, Any] = {"vocab_size": small_tokenizer.vocab_size, "tokenizer": small_tokenizer.identity}
    found = drafts(EngineConfig(adaptive=False, request=False, corpora=corpora, budget=ROWS - 1), **about)
    yield found, texts
    found.proposer.close()


visits = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["digits", "letters"]), st.booleans(), st.integers(0, 30)),
    min_size=1, max_size=20,
)  # fmt: skip


@given(history=visits)
def test_two_tenants_never_see_each_others_text(
    tenants: tuple[BatchDrafts, dict[str, list[int]]], history: list[tuple[int, str, bool, int]]
) -> None:
    """Even where ids of requests are used again, in one batch with each other."""
    corpus, texts = tenants
    running = dict[str, tuple[str, Request]]()
    for rid, name, new, place in history:
        text, key = texts[name], f"r{rid}"
        if new or running.get(key, ("", None))[0] != name:
            wishes = {"draftstore": {"corpus": name}}
            running[key] = (name, Request(key, text[place : place + 3] or text[:1], wishes))
        running[key][1].output_ids.append(text[place % len(text)])
        tokens, _ = corpus.draft([request for _, request in running.values()], [[]] * len(running))
        for (owner, _), row in zip(running.values(), tokens.reshape(-1, ROWS), strict=True):
            assert set(row.tolist()) <= set(texts[owner])
    assert corpus.proposer.figures.failures == 0


def open_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch, *, group: Any = ALONE, **settings: Any
) -> Worker:
    for name, value in settings.pop("environment", {}).items():
        monkeypatch.setenv(f"DRAFTSTORE_{name}", str(value))
    args = server_args(model_path=str(model), **settings)
    settle(args)
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=384))
    monkeypatch.setattr(Worker, "_tensor_parallel", lambda _: group)
    return Worker(args, 0, 0, SimpleNamespace(says=says, model_runner=runner))


@pytest.fixture
def model(small_tokenizer: TextTokenizer, tmp_path: Path) -> Path:
    small_tokenizer.save(tmp_path)
    return tmp_path


def test_the_worker_opens_what_the_settings_name(
    model: Path,
    small_store: Path,
    wide_store: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    environment = {"STORES": small_store, "BUDGET": 8, "METRICS": "nowhere"}
    made = open_worker(model, monkeypatch, environment=environment)
    assert "no metrics at 'nowhere'" in caplog.text, "a port that is taken ends nothing"
    corpus = made.ngram_corpus
    assert (corpus.rows, corpus.proposer.budget) == (9, 8)
    corpus.proposer.close()
    made = open_worker(
        model, monkeypatch, speculative_num_draft_tokens=4, speculative_ngram_max_bfs_breadth=1
    )
    _, mask = made.ngram_corpus.draft([Request("one", [1, 2, 3, 1, 4, 1])], [[]])
    assert np.array_equal(mask.reshape(4, 4), np.tri(4, dtype=bool)), (
        "a chain, as the settings of SGLang want it"
    )
    made.ngram_corpus.proposer.close()
    with pytest.raises(TokenizerError, match="was built with tokenizer"):
        open_worker(model, monkeypatch, environment={"STORES": wide_store})


def test_all_processes_of_a_model_verify_what_the_first_one_drafts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    sent: list[Any] = []

    def broadcast(tensor: Any, *, src: int, group: str) -> None:
        assert (src, group) == (4, "processors")
        if first:
            sent.append(tensor.clone())
        else:
            tensor.copy_(sent.pop(0))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    found = []
    for first in (True, False):
        group = SimpleNamespace(
            world_size=2, rank_in_group=0 if first else 1, ranks=[4, 5], cpu_group="processors"
        )
        made = open_worker(model, monkeypatch, group=group, environment={"METRICS": 0})
        made.enable_overlap = False
        batch = Batch([Request(f"r{place}", [1, 2, 3, 1, place]) for place in (2, 3)], None)
        found.append(made._prepare_draft_tokens(batch))
        assert len(made.ngram_corpus) == (2 if first else 0)
    assert [part.tobytes() for part in found[0]] == [part.tobytes() for part in found[1]]
    assert found[1][1].dtype == np.bool_


def test_a_cpu_does_not_overlap_passes_and_what_is_set_stays() -> None:
    args = server_args(device="cpu", speculative_num_draft_tokens=64, max_running_requests=7)
    settle(args)
    assert args.disable_overlap_schedule
    assert (args.speculative_num_draft_tokens, args.max_running_requests) == (64, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "npu"}, "SGLang verifies trees on cuda"),
        ({"attn_dp_size": 2}, "data-parallel attention: remove that"),
        ({"page_size": 64}, "trees need --page-size 1"),
        ({"speculative_num_draft_tokens": 1}, "pass 2 or more"),
    ],
)
def test_what_does_not_go_with_trees_is_refused_at_the_start(settings: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        settle(server_args(**settings))


def test_a_request_that_cannot_be_read_costs_its_drafts_alone() -> None:
    corpus, odd, other = drafts(), Request("odd", [1, 2, 1, 2]), Request("other", [1, 2, 1, 2])
    odd.origin_input_ids_unpadded = None  # type: ignore[assignment]
    tokens, mask = corpus.draft([odd, other], [[7], []])
    assert tokens.reshape(2, ROWS)[:, :2].tolist() == [[7, 7], [2, 1]]
    assert mask.reshape(2, ROWS, ROWS)[0].sum() == ROWS * (ROWS + 1) // 2
    corpus.draft([Request("huge", [1]), Request("empty", [])], [[2**40], []])
    assert corpus.proposer.figures.failures == 2


def test_an_id_that_is_used_again_and_a_request_that_was_away_are_read_from_the_start() -> None:
    corpus, other = drafts(), Request("one", [7, 8, 9, 1, 3, 7, 8])
    corpus.draft([Request("one", [1, 2, 3, 1, 2])], [[]])
    assert corpus.draft([other], [[]])[0][1] == 9
    for step in range(80):
        corpus.draft([Request("two", [step % 5])], [[]])
    assert len(corpus) == len(corpus.proposer) == 1
    other.output_ids.extend([9, 7])
    assert corpus.draft([other], [[]])[0][1] == 8
    assert corpus.proposer.figures.failures == 0
