"""Log-probabilities of sampled answers with drafts: those of scoring the same texts without, as trainers compare them.

The model is a tiny random Llama, or with DRAFTSTORE_VLLM_MODEL one from a folder, with its tokenizer.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftstore.text.tokenizer import load_tokenizer
from tests.engines_vllm.counting import Counting
from tests.engines_vllm.engines import make_model, running

EPOCHS, ANSWERS, TOKENS = 6, 4, 24
Texts = list[list[int]]
Values = list[list[float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = os.environ.get("DRAFTSTORE_VLLM_MODEL")
    return Path(own) if own else make_model(tmp_path_factory.mktemp("vllm") / "tiny", spread=0.8)


@pytest.fixture(autouse=True)
def temperatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mend vLLM 0.32.0 on CPUs: it divides logits by memory that was never written (issue 55005 of vLLM).

    Every drafter is affected; without this, answers with drafts are not samples of the model.
    """
    from vllm.v1.sample import rejection_sampler

    def expand(each: Any, ends: Any, count: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        sizes = ends.diff(prepend=ends.new_zeros(1)).long()
        return each.where(each != replace_from, replace_to).repeat_interleave(sizes, output_size=count)

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


def sample(engine: Any, prompts: Texts) -> tuple[Texts, Values]:
    """Answer every prompt several times in each epoch; return answers, and what the engine says of their tokens."""
    from vllm import SamplingParams

    answers, said = Texts(), Values()
    for epoch in range(EPOCHS):
        how = [
            SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, seed=seed)
            for seed in range(1000 * epoch, 1000 * epoch + len(prompts))
        ]  # fmt: skip
        for done in engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False):
            (output,) = done.outputs
            answers.append(list(output.token_ids))
            said.append([row[token].logprob for row, token in zip(output.logprobs, answers[-1], strict=True)])
    return answers, said


def score(engine: Any, prompts: Texts, answers: Texts) -> Values:
    """Return what an engine says of the tokens of answers that it reads."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts * EPOCHS, answers, strict=True)]
    scored = engine.generate([{"prompt_token_ids": ids} for ids in texts], how, use_tqdm=False)
    return [
        [row[token].logprob for row, token in zip(done.prompt_logprobs[-TOKENS:], answer, strict=True)]
        for done, answer in zip(scored, answers, strict=True)
    ]


def test_log_probabilities_of_rollouts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [" ".join(f"w{i}" for i in range(first, first + 12)) for first in (3, 40, 90, 150)]
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode(text, bos=False).tolist() for text in counts for _ in range(ANSWERS)]
    monkeypatch.setenv("DRAFTSTORE_LIVE", "rollouts")
    monkeypatch.setenv("DRAFTSTORE_RECALL", "16")
    sampled = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with running(model, drafts=True, logprobs_mode=mode) as engine:
            sampled[mode] = sample(engine, prompts)
        made = Counting.last
        assert made.proposer is not None
        assert made.proposer.figures.failures == 0
        per_pass = sum(map(len, sampled[mode][0])) / made.passes
        print(
            f"{mode}: {per_pass:.2f} tokens a pass; {made.proposer.figures.by_label('source_matched_tokens')}"
        )
        assert per_pass > 1.1
    with running(model, drafts=False) as engine:
        sampled["plain"] = sample(engine, prompts)
        for name, (answers, said) in sampled.items():
            off = np.abs(np.array(said) - score(engine, prompts, answers))
            print(f"{name}: {off.size} tokens, off by {off.max():.1e} at most, {off.mean():.1e} on average")
            assert off.max() < 1e-4
