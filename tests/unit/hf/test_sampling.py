"""Sampling with drafts through `generate`: the same tokens for the same seed, and the exact distribution.

The model is tiny and in float64, so that a pass over many rows gives what passes over single rows give.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError, ProbabilityError
from draftstore.hf import generate
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Adversary, OverBudget, Prophet, RandomTrees, Silent, tree_of
from tests.fakes.adversaries import Path as Tokens
from tests.fakes.hf_models import build, tiny
from tests.reference import Model, Warp, chi_square_p, joint_of_three, warped

VOCAB = 8
PROMPT = (3, 1)
RUNS = 1_500
"""Enough: a draw for each path, the penalty of another row or scores of another row are found in 199 of 200 samples."""
CHECKED = 1e-4


def small_model() -> Any:
    return tiny(
        vocab_size=VOCAB,
        num_hidden_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        spread=0.9,
    )


@functools.cache
def exact_scores() -> Model:
    """Return what the model says of a text that it reads at once, without a cache."""
    known: dict[Tokens, NDArray[np.float64]] = {}

    @torch.no_grad()
    def scores(text: Sequence[int]) -> NDArray[np.float64]:
        key = tuple(text)
        if key not in known:
            known[key] = small_model()(torch.tensor([key])).logits[0, -1].numpy()
        return known[key]

    return scores


# --- the distribution ---


class Shaped(Adversary):
    """Proposes the likeliest tokens, so many at each depth."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__(VOCAB)
        self.widths = widths
        self.known: dict[Tokens, DraftTree] = {}

    def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
        text = tuple(self.text)
        if text not in self.known:
            paths: list[Tokens] = [()]
            for width in self.widths:
                paths = [
                    (*path, token)
                    for path in paths
                    for token in np.argsort(-exact_scores()([*text, *path]))[:width].tolist()
                ]
            self.known[text] = tree_of(paths)
        return self.known[text]


CASES: dict[str, tuple[Warp, Sequence[int]]] = {
    "temperature and penalty": (Warp(temperature=0.8, penalty=1.8), [2, 3]),
    "top-k and top-p": (Warp(top_k=5, top_p=0.85), [3, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_joint_of_three_tokens_is_exact(case: str) -> None:
    """Of the three behind the first, which the prefill yields: they come from trees in which paths share tokens."""
    warp, widths = CASES[case]
    drafter = Shaped(widths)
    config = GenerationConfig(max_new_tokens=4, **options_of(warp))  # type: ignore[no-untyped-call]
    counts = np.zeros((VOCAB,) * 3, np.int64)
    torch.manual_seed(7)
    for _ in range(RUNS):
        output = generate(small_model(), torch.tensor([PROMPT]), drafter=drafter, generation_config=config)
        assert isinstance(output, torch.Tensor)
        counts[tuple(output[0, len(PROMPT) + 1 :].tolist())] += 1
    assert drafter.off_first > RUNS / 10
    model = warped(exact_scores(), warp)
    expected = sum(
        chance * joint_of_three(model, [*PROMPT, first]) for first, chance in enumerate(model(PROMPT))
    )
    assert chi_square_p(counts, np.asarray(expected)) > CHECKED


def options_of(warp: Warp) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": warp.temperature,
        "top_k": warp.top_k,
        "top_p": warp.top_p,
        "repetition_penalty": warp.penalty,
    }


# --- the seed ---

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.05},
    "typical": {"top_k": 0, "typical_p": 0.9},
    "epsilon and eta": {"top_k": 0, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
    "penalty": {"top_k": 0, "repetition_penalty": 1.5},
    "no n-gram twice": {"top_k": 20, "no_repeat_ngram_size": 2},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "min_new_tokens": 5},
}
DRAFTERS: dict[str, Callable[[int, list[int]], Adversary | None]] = {
    "none": lambda vocab_size, truth: None,
    "silent": lambda vocab_size, truth: Silent(vocab_size),
    "random": lambda vocab_size, truth: RandomTrees(vocab_size),
    "over budget": lambda vocab_size, truth: OverBudget(vocab_size),
    "half a prophet": lambda vocab_size, truth: Prophet(vocab_size, [truth], error_rate=0.5),
    "prophet": lambda vocab_size, truth: Prophet(vocab_size, [truth]),
}


def sampled(model: Any, ids: torch.Tensor, seed: int, **options: Any) -> tuple[list[int], torch.Tensor]:
    """Sample plainly: the text, and the state that the random generator is left in."""
    torch.manual_seed(seed)
    output = model.generate(ids, **options)
    return output[0].tolist(), torch.get_rng_state()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trees": (lambda: tiny(vocab_size=40), {}),
    "eager": (lambda: tiny("qwen3", vocab_size=40, attention="eager"), {}),
    "window": (lambda: tiny("mistral", vocab_size=40, sliding_window=6), {}),
}
PAIRS = [
    *[(name, "all", "trees") for name in DRAFTERS],
    *[("half a prophet", options, "trees") for options in OPTIONS],
    *[(name, "penalty", kind) for name in ("random", "half a prophet") for kind in KINDS],
]


@pytest.mark.parametrize(("name", "options", "kind"), PAIRS)
def test_the_same_seed_gives_the_same_text(name: str, options: str, kind: str) -> None:
    make, more = KINDS[kind]
    model, ids = make(), torch.tensor([[5, 17, 3, 5]])
    asked: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True} | OPTIONS[options] | more
    for seed in range(2):
        truth, state = sampled(model, ids, seed, **asked)
        drafter = DRAFTERS[name](40, truth)
        torch.manual_seed(seed)
        output = generate(model, ids, drafter=drafter, budget=24, **asked)
        assert isinstance(output, torch.Tensor)
        assert output[0].tolist() == truth
        assert torch.equal(torch.get_rng_state(), state), "as many draws as plain sampling makes"
        if name == "prophet" and drafter is not None:
            assert drafter.off_first > 10


# --- no probabilities ---


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
