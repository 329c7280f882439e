"""The drafter inside vLLM, against doubles of vLLM's calls: right for every row, clear at the start, never failing."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.request import RequestDrafter
from draftstore.engines.config import CONFIG_VARIABLE
from draftstore.engines.vllm import Drafter
from draftstore.errors import DraftstoreError, EngineError
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.chains import best_chain
from tests.examples import examples
from tests.fakes.servers import free_port
from tests.fakes.vllm_batch import Batch, Request, vllm_config

VOCAB, CHAIN, LONGEST, ROWS = 50, 4, 64, 4


MADE: list[Drafter] = []


def drafter(**about: Any) -> Drafter:
    about = {"chain": CHAIN, "vocab": VOCAB, "longest": LONGEST, "rows": ROWS, **about}
    MADE.append(Drafter(vllm_config(**about)))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close what a test has opened: other tests look at whether a store is in use."""
    yield
    while MADE:
        if (proposer := MADE.pop().proposer) is not None:
            proposer.close()


def expected_chain(text: list[int]) -> list[int]:
    """Return what a session of this text alone drafts."""
    room = LONGEST - 1 - len(text)
    session = RequestDrafter(VOCAB).session(np.array(text, np.int32))
    tree = session.propose(16 if room >= CHAIN else max(0, room))
    chain: list[int] = best_chain(tree, CHAIN).tokens.tolist()
    return chain


texts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
requests = st.lists(
    st.builds(Request, texts, st.lists(st.integers(0, 2), min_size=1, max_size=40)), min_size=1, max_size=6
)


@examples(30)
@given(requests, st.data())
def test_every_row_gets_the_drafts_of_its_own_text(waiting: list[Request], data: st.DataObject) -> None:
    batch = Batch(drafter(), chain=CHAIN, longest=LONGEST, rows=ROWS)
    for _ in range(40):
        for row in reversed(range(len(batch.rows))):
            if batch.rows[row].over:
                batch.leave(row)
        while waiting and len(batch.rows) < ROWS:
            batch.join(waiting.pop(0), chunks=data.draw(st.integers(1, 3)))
        if not batch.rows:
            break
        if data.draw(st.booleans()):
            batch.reorder(data.draw(st.permutations(range(len(batch.rows)))))
        if len(batch.rows) > 1 and data.draw(st.booleans()):  # preempted
            waiting.append(batch.leave(data.draw(st.integers(0, len(batch.rows) - 1))))
        step = batch.step()
        for request, new, draft in zip(batch.rows, *step, strict=True) if step else ():
            assert draft == (expected_chain(request.text) if new else [])


def test_a_step_costs_a_token_less_for_each_accepted_one() -> None:
    request = Request([1, 2, 3, 4, 5] * 3, [1, 2, 3, 4, 5] * 8)
    batch = Batch(drafter(), chain=CHAIN, longest=LONGEST, rows=ROWS)
    batch.join(request)
    while not request.over:
        batch.step()
    assert batch.passes == 1 + 39 // (CHAIN + 1) + 1
    assert batch.drafter.proposer.figures.accepted_length > 4


def counting(prompt: list[int]) -> Request:
    return Request(prompt, list(range(prompt[-1] + 1, VOCAB)))


def passes_of(made: Drafter) -> int:
    batch, request = Batch(made, chain=CHAIN, longest=LONGEST, rows=ROWS), counting([0, 1])
    batch.join(request)
    while not request.over:
        batch.step()
    return batch.passes


def test_nothing_leaves_propose(caplog: pytest.LogCaptureFixture) -> None:
    made: Any = drafter()
    ids = np.ones((ROWS, LONGEST), np.int32)
    with caplog.at_level(logging.WARNING):
        assert made.propose([[1], []], np.array([3]), ids[:, :3]) != []
        assert made.propose([[1], [1]], np.array([3]), ids) == [[], []]  # a size is missing
        assert made.propose([[1], [1]], None, None) == [[], []]
    assert made.proposer.figures.failures == 2
    assert len(caplog.records) == 1


def test_of_several_processes_one_drafts() -> None:
    made = drafter(rank=5, tensor_parallel_size=4)
    assert made.proposer is None
    assert made.propose([[1], []], np.array([3, 0]), np.ones((2, 4), np.int32)) == [[], []]
    assert drafter(rank=4, tensor_parallel_size=4).proposer is not None
    assert drafter(rank=4, tensor_parallel_size=4, prefill_context_parallel_size=2).proposer is None


def test_each_engine_of_a_machine_serves_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("DRAFTSTORE_METRICS", f"127.0.0.1:{port - 1}")
    passes_of(drafter(data_parallel_index=1))
    text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    assert 'draftstore_engine_steps_total{corpus="",engine="vllm"} ' in text


def test_a_store_drafts_for_the_tokenizer_that_vllm_uses(
    small_store: Path, small_tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_tokenizer.save(tmp_path)
    monkeypatch.setenv("DRAFTSTORE_STORES", str(small_store))
    monkeypatch.setenv("DRAFTSTORE_REQUEST", "false")
    made = partial(drafter, vocab=small_tokenizer.vocab_size)
    text = small_tokenizer.encode("for item in items:\n", bos=True)
    ids = np.zeros((1, 64), np.int32)
    ids[0, : len(text)] = text
    (chain,) = made(tokenizer=str(tmp_path)).propose([[0]], np.array([len(text)]), ids)
    assert 1 <= len(chain) <= CHAIN
    with pytest.raises(EngineError, match="or name the model's in DRAFTSTORE_TOKENIZER"):
        made(tokenizer=str(tmp_path / "none"))
    monkeypatch.setenv("DRAFTSTORE_TOKENIZER", str(tmp_path))
    assert made(tokenizer=str(tmp_path / "none")).proposer is not None


@pytest.mark.parametrize(
    ("variables", "about", "reason"),
    [
        ({}, {"chain": None}, "give \"num_speculative_tokens\""),
        ({"REQUEST": "false"}, {}, "no source of drafts: set DRAFTSTORE_STORES"),
        ({"STORES": "/nowhere"}, {}, "no tokenizer at 'nowhere'.*DRAFTSTORE_TOKENIZER"),
        ({"BUDGET": "0"}, {}, "a budget of 0 nodes"),
        ({"METRICS": "nowhere"}, {}, "no metrics at 'nowhere'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_the_start(
    variables: dict[str, str], about: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv("DRAFTSTORE_" + name, text)
    with pytest.raises(DraftstoreError, match=reason):
        drafter(**about)


def test_corpora_by_request_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draftstore.toml").write_text("[corpora.acme]\nrequest = true\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "draftstore.toml"))
    with pytest.raises(EngineError, match="run an engine for each corpus"):
        drafter()
