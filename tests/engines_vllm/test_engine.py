"""Greedy answers of a vLLM engine: the same as without drafts, in as many passes as the replay predicts.

The model is a tiny random Llama, or with DRAFTSTORE_VLLM_MODEL one from a folder, with its tokenizer.
"""

import json
import os
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks.engines.busy import answer, serve_vllm
from benchmarks.engines.compare import PLAIN, SUFFIX, WAYS, figures, missing_module
from draftstore.assembly.drafter import assemble
from draftstore.assembly.sources import Sources
from draftstore.decoding.replay import Recording, replay
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.engines_vllm.counting import Counting
from tests.engines_vllm.engines import CHAIN, ROWS, make_model, running
from tests.fakes.served import served

PROMPTS, TOKENS = 50, 48
RELEASE = "answers"
Texts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = os.environ.get("DRAFTSTORE_VLLM_MODEL")
    return Path(own) if own else make_model(tmp_path_factory.mktemp("vllm") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> TextTokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def prompts(tokenizer: TextTokenizer) -> Texts:
    salad = np.random.default_rng(0)
    return [salad.integers(3, tokenizer.vocab_size, salad.integers(4, 24)).tolist() for _ in range(PROMPTS)]


class Run(NamedTuple):
    """What an engine answered.

    Attributes:
        answers: int [any] each.
        passes: after those that read the prompts.
        preemptions: of requests.
        predicted: tokens that each source had.
    """

    answers: Texts
    passes: int
    preemptions: int
    predicted: dict[str, int]

    @property
    def accepted_length(self) -> float:
        return (sum(map(len, self.answers)) - len(self.answers)) / self.passes


def run(model: Path, prompts: Texts, *, drafts: bool, tokens: int = TOKENS, **settings: Any) -> Run:
    """Answer prompts in batches of 1, 2, ... 8, 1, 2, ..."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers: Texts = []
    with running(model, drafts=drafts, **settings) as engine:
        for size in cycle(range(1, ROWS + 1)):
            asked: Any = [{"prompt_token_ids": ids} for ids in prompts[len(answers) : len(answers) + size]]
            if not asked:
                break
            answers += [
                list(done.outputs[0].token_ids) for done in engine.generate(asked, greedy, use_tqdm=False)
            ]
        preempted = sum(
            metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions"
        )
    if not drafts:
        return Run(answers, len(answers) * (tokens - 1), preempted, {})
    made = Counting.last
    assert made.proposer is not None
    assert made.proposer.figures.failures == 0
    return Run(
        answers,
        made.passes - len(answers),
        preempted,
        made.proposer.figures.by_label("source_matched_tokens"),
    )


@pytest.fixture(scope="module")
def plain(model: Path, prompts: Texts) -> Run:
    return run(model, prompts, drafts=False)


@pytest.fixture(scope="module")
def store(
    plain: Run, prompts: Texts, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a store of every other answer."""
    folder = tmp_path_factory.mktemp("store")
    both = [[*prompt, *answer] for prompt, answer in zip(prompts, plain.answers, strict=True)]
    lines = [json.dumps({"text": tokenizer.decode(ids)}) + "\n" for ids in both[::2]]
    (folder / "answers.jsonl").write_text("".join(lines))
    build_rest(
        RestOptions(corpus=(folder / "answers.jsonl",), name=RELEASE), tokenizer, folder / RELEASE, workers=1
    )
    return folder / RELEASE


@pytest.fixture(scope="module")
def predicted(plain: Run, prompts: Texts, store: Path, vocab_size: int, tokenizer: TextTokenizer) -> float:
    """Return the accepted length of our replay with chains of the same length."""
    recordings = [
        Recording(str(place), np.array(prompt, np.int32), np.array(answer, np.int32))
        for place, (prompt, answer) in enumerate(zip(prompts, plain.answers, strict=True))
    ]
    sources = Sources(stores=(store,), request=True)
    with assemble(sources, vocab_size=vocab_size, tokenizer=tokenizer.identity) as alone:
        return replay(alone, recordings, budget=16, chain=CHAIN).accepted_length


def test_a_local_store_and_the_request(
    model: Path, plain: Run, prompts: Texts, store: Path, predicted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTORE_STORES", str(store))
    done = run(model, prompts, drafts=True)
    assert done.answers == plain.answers
    print(f"tokens a pass: {done.accepted_length:.4f}, replay {predicted:.4f}; {done.predicted}")
    assert done.accepted_length == pytest.approx(predicted, rel=0.02)
    assert done.predicted[f"rest:{RELEASE}"] > PROMPTS


@pytest.mark.parametrize("killed", [False, True])
def test_the_lookup_service(
    killed: bool,
    model: Path,
    plain: Run,
    prompts: Texts,
    store: Path,
    predicted: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served("--store", store, "--http", "none") as service:
        process = service.process
        monkeypatch.setenv("DRAFTSTORE_LOOKUP", f"unix:{service.socket}")
        monkeypatch.setenv("DRAFTSTORE_RELEASE", RELEASE)
        monkeypatch.setenv("DRAFTSTORE_DEADLINE", "30")  # this machine may be busy
        monkeypatch.setattr(Counting, "then", {40: process.kill} if killed else {})
        done = run(model, prompts, drafts=True)
        assert (process.poll() is not None) is killed
    print(f"tokens a pass: {done.accepted_length:.4f}; {done.predicted}")
    assert done.answers == plain.answers
    assert done.predicted[f"lookup:{RELEASE}"] > 0
    if killed:
        assert 1.0 < done.accepted_length < predicted
    else:
        assert done.accepted_length == pytest.approx(predicted, rel=0.02)


def test_answers_of_a_moment_ago(
    model: Path, plain: Run, prompts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSTORE_LIVE", "team")
    monkeypatch.setenv("DRAFTSTORE_REQUEST", "false")
    done = run(model, [*prompts, *prompts], drafts=True)
    assert done.answers == plain.answers * 2
    print(f"tokens a pass: {done.accepted_length:.4f}; {done.predicted}")
    assert done.predicted["live:team"] > PROMPTS * TOKENS / 2


def test_prompts_in_chunks_and_preemptions(
    model: Path, prompts: Texts, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have memory for a few texts only, and read prompts 64 tokens at a time."""
    if "DRAFTSTORE_VLLM_MODEL" in os.environ:
        pytest.skip("the memory is made for the tiny model")
    few = {"kv_cache_memory_bytes": KV_BYTES, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    longer = [(prompt * 30)[:90] for prompt in prompts[: 2 * ROWS]]
    expected = run(model, longer, drafts=False, tokens=96)
    monkeypatch.setenv("DRAFTSTORE_STORES", str(store))
    done = run(model, longer, drafts=True, tokens=96, **few)
    assert done.answers == expected.answers
    assert done.preemptions > 0


def test_all_ways_to_draft_that_are_compared(model: Path, prompts: Texts, tmp_path: Path) -> None:
    """Let `benchmarks.engines --compare` measure the tiny model: each answers the same prompts twice."""
    found: dict[str, Any] = {}
    for name, (speculative, variables) in WAYS.items():
        if name == SUFFIX and missing_module():
            continue
        options = {"speculative": speculative, "whole": True}
        with (
            (tmp_path / name).open("w") as log,
            closing(serve_vllm(model, options, variables, log)) as engine,
        ):
            answer(engine, prompts[:4], 2, TOKENS)
            found[name] = answer(engine, prompts[:4], 2, TOKENS)
    rows = {row["drafts"]: row for row in figures([found])}
    assert all(row["equal"] for row in rows.values())
    assert rows[PLAIN]["tokens_a_pass"] == 1.0
    assert all(row["tokens_a_pass"] > 1.0 for name, row in rows.items() if name != PLAIN)
    assert set(rows) >= {PLAIN, "ngram", "draftstore"}


KV_BYTES = 768 << 10
"""For 768 tokens of the tiny model."""
