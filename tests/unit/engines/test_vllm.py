"""The drafter inside vLLM, against doubles of vLLM's calls: right for every row, clear at the start, never failing.

The engine's data is as in vLLM 0.32.0, `vllm/v1/worker/gpu_model_runner.py` and `gpu_input_batch.py`.
Real engines: `make test-vllm`.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.drafting.request import RequestDrafter
from draftstore.engines.vllm import Drafter
from draftstore.errors import EngineError
from draftstore.text.tokenizer import TextTokenizer
from draftstore.trees.tree import best_chain
from tests.fakes.servers import free_port

VOCAB, CHAIN, LONGEST, ROWS = 50, 4, 64, 4


PARALLEL = {
    "rank": 0,
    "tensor_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_index": 0,
}
MADE: list[Drafter] = []


def drafter(
    *, chain: int | None = CHAIN, vocab: int = VOCAB, tokenizer: str = "nowhere", **parallel: int
) -> Drafter:
    """Make a drafter from what it reads of an engine's configuration."""
    model = SimpleNamespace(max_model_len=LONGEST, tokenizer=tokenizer, get_vocab_size=lambda: vocab)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=chain, method="custom_class"),
        model_config=model,
        parallel_config=SimpleNamespace(**PARALLEL | parallel),
    )
    MADE.append(Drafter(config))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draft in every step, and close what a test has opened: other tests look at whether a store is in use."""
    monkeypatch.setenv("DRAFTSTORE_ADAPTIVE", "false")
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


moves = st.lists(
    st.tuples(
        st.permutations(range(4)), st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=4, max_size=4)
    ),
    max_size=15,
)


@given(moves)
def test_every_row_gets_the_drafts_of_its_own_text(steps: list[tuple[list[int], list[list[int]]]]) -> None:
    """Through every move between rows; where the prompt is not read to its end, nobody asks for drafts."""
    made, texts = drafter(), [[number % 3] for number in range(4)]
    ids = np.full((ROWS, LONGEST), -1, np.int32)
    for order, added in steps:
        sampled = [added[number] for number in order]
        texts = [[*text, *new] for text, new in zip(texts, added, strict=True)]
        for row, number in enumerate(order):
            ids[row, : len(texts[number])] = texts[number]  # rests of other texts lie behind it
        sizes = np.array([len(texts[number]) for number in order], np.int32)
        expected = [expected_chain(texts[number]) if added[number] else [] for number in order]
        assert made.propose(sampled, sizes, ids, slot_mappings={}) == expected


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
    made, ids = drafter(data_parallel_index=1), np.array([[1, 2, 1, 2]], np.int32)
    for size in (3, 4):
        made.propose([[int(ids[0, size - 1])]], np.array([size]), ids)
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
    with pytest.raises(EngineError, match="or set DRAFTSTORE_TOKENIZER to the model's"):
        made(tokenizer=str(tmp_path / "none"))
    monkeypatch.setenv("DRAFTSTORE_TOKENIZER", str(tmp_path))
    assert made(tokenizer=str(tmp_path / "none")).proposer is not None


@pytest.mark.parametrize(
    ("variables", "about", "reason"),
    [
        ({}, {"chain": None}, "set \"num_speculative_tokens\""),
        ({"REQUEST": "false"}, {}, "no source of drafts: set DRAFTSTORE_STORES"),
        ({"METRICS": "nowhere"}, {}, "no metrics at 'nowhere'"),
        ({"ENGINE_CONFIG": "draftstore.toml"}, {}, "run an engine for each corpus"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_at_the_start(
    variables: dict[str, str],
    about: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draftstore.toml").write_text("[corpora.acme]\nrequest = true\n")
    for name, text in variables.items():
        monkeypatch.setenv("DRAFTSTORE_" + name, text)
    with pytest.raises(EngineError, match=reason):
        drafter(**about)


def test_answers_alone_are_remembered_where_a_prompt_begins_with_the_text_before(
    small_store: Path, small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTORE_LIVE", "team")
    monkeypatch.setenv("DRAFTSTORE_REQUEST", "false")
    made = drafter(tokenizer=str(small_store / "tokenizer"), vocab=small_tokenizer.vocab_size)

    def step(text: list[int], new: int = 1) -> list[int]:
        table = np.zeros((ROWS, LONGEST), np.int32)
        table[0, : len(text)] = text
        return made.propose([text[-new:]], np.array([len(text), 0, 0, 0], np.int32), table)[0]

    text = [*range(1, 10)]
    for token in range(20, 24):
        text.append(token)
        step(text)
    text += [*range(30, 40), 50]  # what the user says next, and the first token of the next answer
    step(text)
    step([*text, 51])
    assert step([5, 20, 21]) == [22, 23]
    assert step([5, 30, 31]) == []
    assert step([5, 50]) == [51]
