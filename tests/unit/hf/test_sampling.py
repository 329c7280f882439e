"""Sampling with drafts: the exact distribution, in a batch. `test_matrix` shows the same tokens for the same seed."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LogitsProcessor, LogitsProcessorList

from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError, ProbabilityError
from draftstore.hf import generate
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Adversary, tree_of
from tests.fakes.adversaries import Path as Tokens
from tests.fakes.hf_models import build, tiny
from tests.reference import Warp, chi_square_p, joint_of_three, warped

VOCAB = 8
PROMPT = (3, 1)
WARP = Warp(temperature=0.8, penalty=1.8)
TEXTS, RUNS = 25, 60
"""Enough: a draw for each path, the penalty of another row or scores of another row are found in 199 of 200 samples."""


def small_model() -> Any:
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return tiny(
        vocab_size=VOCAB, num_hidden_layers=1, hidden_size=8, intermediate_size=8, spread=0.9, **heads
    )


@functools.cache
def scores_of(text: Tokens) -> NDArray[np.float64]:
    """Return what the model says of a text that it reads at once, without a cache."""
    with torch.no_grad():
        scores: NDArray[np.float64] = small_model()(torch.tensor([text])).logits[0, -1].numpy()
    return scores


def scores(text: Sequence[int]) -> NDArray[np.float64]:
    return scores_of(tuple(text))


class Shaped(Adversary):
    """Proposes the likeliest tokens, two and three at the first two depths: paths share tokens."""

    known: dict[Tokens, DraftTree] = {}  # noqa: RUF012 (shared by all)

    def __init__(self) -> None:
        super().__init__(VOCAB)

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        text = tuple(self.text)
        if text not in self.known:
            paths: list[Tokens] = [()]
            for width in (2, 3):
                paths = [
                    (*path, token)
                    for path in paths
                    for token in np.argsort(-scores([*text, *path]))[:width].tolist()
                ]
            self.known[text] = tree_of(paths)
        return self.known[text]


class ShapedDrafter(Shaped):
    """Gives each text a session of its own."""

    def session(self, prompt_ids: Any, **prefill: Any) -> Adversary:
        return Shaped().session(prompt_ids, **prefill)


@pytest.mark.slow
def test_the_joint_of_three_tokens_is_exact_for_every_text_of_a_batch() -> None:
    """Of the three behind the first, which the prefill yields; each text has random numbers of its own."""
    prompts = torch.tensor([PROMPT]).expand(TEXTS, -1)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 4}
    options |= {"temperature": WARP.temperature, "repetition_penalty": WARP.penalty}
    counts = np.zeros((VOCAB,) * 3, np.int64)
    torch.manual_seed(11)
    for _ in range(RUNS):
        output: Any = generate(small_model(), prompts, drafter=ShapedDrafter(), **options)
        for row in output[:, len(PROMPT) + 1 :].tolist():
            counts[tuple(row)] += 1
    model = warped(scores, WARP)
    expected = sum(
        chance * joint_of_three(model, [*PROMPT, first]) for first, chance in enumerate(model(PROMPT))
    )
    assert chi_square_p(counts, np.asarray(expected)) > 1e-4


class Extreme(LogitsProcessor):
    """Scores that no probabilities come of."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, torch.inf)


def test_settings_without_finite_probabilities_are_refused() -> None:
    options: Any = {"do_sample": True, "max_new_tokens": 2, "drafter": RequestDrafter(VOCAB)}
    model = build(vocab_size=VOCAB)
    with pytest.raises(ProbabilityError, match="milder penalties"):
        generate(model, torch.tensor([PROMPT]), logits_processor=LogitsProcessorList([Extreme()]), **options)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(DecodingError, match="another dtype"):
        generate(model, torch.tensor([PROMPT]), **options)
