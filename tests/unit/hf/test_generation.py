"""Generation with drafts: prompts of all kinds, the end of positions, and requests that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from draftstore.decoding.loop import Step
from draftstore.errors import DecodingError
from draftstore.hf import generate, speculative_generate
from tests.fakes.adversaries import Adversary, OverBudget, Prophet, RandomTrees, Silent
from tests.fakes.hf_models import STORIES, stories, story_ids, tiny

VOCAB = 48
PROMPT = torch.tensor([[5, 7, 11, 13, 17]])
PADDED = torch.tensor([[2, 2, 2, 5, 7, 11, 13, 17]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])


def plain(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(ids, do_sample=False, **({"max_new_tokens": 30} | options))


def drafted(model: Any, drafter: Adversary | None, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return generate(model, ids, drafter=drafter, do_sample=False, **({"max_new_tokens": 30} | options))


def prophet(text: torch.Tensor, error_rate: float = 0.1) -> Prophet:
    """Return a prophet of a text; it goes on behind the end."""
    return Prophet(VOCAB, [[*text[0].tolist(), *range(8)]], error_rate)


# --- attention and prompts ---


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_stories_are_the_same(data: Path, attention: str, cache: str) -> None:
    model = stories(data, torch.float64, attention)
    for story in STORIES[:2]:
        ids = story_ids(data, story)
        expected = plain(model, ids, max_new_tokens=40, cache_implementation=cache)
        known = Prophet(512, [[*expected[0].tolist(), *range(8)]], error_rate=0.2)
        for drafter in (None, known, RandomTrees(512)):
            output = drafted(model, drafter, ids, max_new_tokens=40, cache_implementation=cache)
            assert torch.equal(output, expected)
        assert known.moved > 3


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("mistral", {"sliding_window": 8}),
        ("llama", {"attention": "eager", "dtype": torch.float32}),  # in float64, `eager` gives NaN at padding
    ],
)
def test_left_padding(architecture: str, changes: dict[str, Any]) -> None:
    """The drafter does not see it."""
    model = tiny(architecture, vocab_size=VOCAB, **changes)
    expected = plain(model)
    drafter = prophet(expected)
    output = drafted(model, drafter, PADDED, attention_mask=MASK)
    assert output[0].tolist() == [2, 2, 2, *expected[0].tolist()]
    assert drafter.text == expected[0].tolist()
    assert drafter.moved > 0


def test_a_prompt_in_chunks_and_positions_that_generate_would_take() -> None:
    model = tiny(vocab_size=VOCAB)
    expected = plain(model)
    for options in ({"prefill_chunk_size": 2}, {"position_ids": torch.arange(5)[None]}):
        assert torch.equal(drafted(model, prophet(expected), **options), expected)


# --- the end of positions ---


def test_drafts_end_with_the_text_and_with_the_positions() -> None:
    """GPT-2 has an embedding for each of its positions and none beyond."""
    model = tiny("gpt2", vocab_size=VOCAB, max_position_embeddings=24)
    expected = plain(model, max_new_tokens=19)
    left = [19]

    def check(step: Step) -> None:
        assert int(step.tree.depths.max(initial=0)) <= max(0, left[0] - 1)
        left[0] -= len(step.tokens)

    drafter = prophet(expected, error_rate=0.0)
    assert torch.equal(drafted(model, drafter, max_new_tokens=19, on_step=check), expected)
    assert left == [0]
    assert drafter.moved > 0


@pytest.mark.parametrize("budget", [0, 1, 5, 500])
def test_a_budget_and_the_rows_of_a_pass_bound_what_is_verified(budget: int) -> None:
    steps: list[Step] = []
    model = tiny(vocab_size=VOCAB)
    output = drafted(model, OverBudget(VOCAB), budget=budget, on_step=steps.append)
    assert torch.equal(output, plain(model))
    sizes = [len(step.tree) for step in steps]
    assert max(sizes) <= min(budget, 127)
    assert max(sizes) == budget or budget == 500


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2, expected 1"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "ask for contrastive_search, expected greedy search or sampling"),
        ({"prompt_lookup_num_tokens": 3}, "ask for assisted_generation"),
        ({"assistant_model": tiny}, "assistant_model is set, expected none"),
        ({"past_key_values": DynamicCache()}, "past_key_values is set, expected none"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions with drafts"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states with drafts"),
        ({"inputs_embeds": torch.zeros((1, 5, 32), dtype=torch.float64)}, "inputs_embeds with drafts"),
        ({"output_router_logits": False}, "output_router_logits with drafts: leave it out, or use plain"),
        ({"position_ids": torch.arange(5)[None] + 1}, "position_ids other than the numbers of the tokens"),
        ({"position_ids": torch.zeros((3, 1, 5), dtype=torch.int64)}, "position_ids other than the numbers"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        generate(tiny(attention="eager"), PROMPT, drafter=Silent(64), max_new_tokens=4, **options)


@pytest.mark.parametrize("texts", [1, 2])
def test_a_cache_that_holds_a_text_is_refused(texts: int) -> None:
    model: Any = tiny(vocab_size=VOCAB)
    prompts, options = (
        PROMPT.expand(texts, -1),
        {"custom_generate": speculative_generate, "max_new_tokens": 4},
    )
    expected = plain(model, prompts, max_new_tokens=4)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=60)):
        assert torch.equal(model.generate(prompts, past_key_values=cache, **options), expected)
        model(prompts[:, :2], past_key_values=cache)
        with pytest.raises(DecodingError, match="past_key_values holds a text already"):
            model.generate(prompts, past_key_values=cache, **options)


# --- as custom_generate ---


def test_custom_generate_puts_the_prompt_into_its_streamer() -> None:
    class Noting(BaseStreamer):
        def __init__(self) -> None:
            self.values: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.values.append(value.flatten().tolist())

        def end(self) -> None:
            self.values.append([])

    model: Any = tiny(vocab_size=VOCAB)
    expected = plain(model, max_new_tokens=4)
    streamer = Noting()
    options = {"drafter": prophet(expected), "token_streamer": streamer, "do_sample": False}
    model.generate(PROMPT, custom_generate=speculative_generate, max_new_tokens=4, **options)
    assert streamer.values == [PROMPT[0].tolist(), *expected[0, 5:, None].tolist(), []]
