"""Generation with drafts on every kind of model, attention and cache: which are served how, and which are refused.

What a request may ask for is tested in `test_hf_behaviour`, sampling in `test_hf_sampling`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from draftstore.decoding.loop import Step, Tally
from draftstore.errors import DecodingError
from draftstore.hf import generate, speculative_generate
from draftstore.hf.checks import depth_limit
from draftstore.hf.generation import default_forward
from draftstore.hf.targets import Forward, Prefilled
from draftstore.trees.tree import DraftTree
from tests.fakes.adversaries import Adversary, OverBudget, Prophet, RandomTrees, Silent, tree_of
from tests.fakes.hf_models import ATTENTION, STORIES, build, stories, story_ids, tiny, uncompiled

VOCAB = 48
PROMPT = torch.tensor([[5, 7, 11, 13, 17]])
PADDED = torch.tensor([[2, 2, 2, 5, 7, 11, 13, 17]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])


def plain(model: Any, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return model.generate(ids, do_sample=False, **({"max_new_tokens": 30} | options))


def drafted(model: Any, drafter: Adversary | None, ids: torch.Tensor = PROMPT, **options: Any) -> Any:
    return generate(model, ids, drafter=drafter, do_sample=False, **({"max_new_tokens": 30} | options))


def prophet(text: torch.Tensor, start: int = 0, error_rate: float = 0.1) -> Prophet:
    """Return a prophet of a text from a place on; it goes on behind the end."""
    return Prophet(VOCAB, [[*text[0, start:].tolist(), *range(8)]], error_rate)


class Watched:
    """Notes how passes are run."""

    def __init__(self) -> None:
        self.name = ""
        self.tally = Tally()

    def forward(self, prefilled: Prefilled) -> Forward:
        forward = default_forward(prefilled)
        self.name = type(forward).__name__
        return forward

    @property
    def options(self) -> dict[str, Any]:
        return {"forward": self.forward, "on_step": self.tally.add}


# --- attention, caches, architectures ---

DRAFTERS: dict[str, Callable[[list[list[int]]], Adversary | None]] = {
    "none": lambda texts: None,
    "prophet": lambda texts: Prophet(512, texts, error_rate=0.2),
    "random": lambda texts: RandomTrees(512),
}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_stories_are_the_same(data: Path, attention: str, cache: str) -> None:
    """Plain generate fails with flex_attention and a static cache, so flex_attention is compared with a dynamic one."""
    flexible = attention == "flex_attention"
    model = stories(data, torch.float64, attention)
    length = 24 if flexible else 40  # what is not compiled is slow
    watched = Watched()
    moved = 0
    with uncompiled():
        for story in STORIES[: 1 if flexible else 2]:
            ids = story_ids(data, story)
            made = None if flexible else cache
            expected = plain(model, ids, max_new_tokens=length, cache_implementation=made)
            for make in DRAFTERS.values():
                drafter = make([[*expected[0].tolist(), *range(8)]])
                output = drafted(
                    model, drafter, ids, max_new_tokens=length, cache_implementation=cache, **watched.options
                )
                assert torch.equal(output, expected)
                moved += drafter.moved if drafter else 0
    assert watched.name == "TreeForward"
    assert moved > 3


@torch.no_grad()
def single_rows_are_right() -> bool:
    """Return whether torch compiles attention well for a single row, which takes seconds; a story takes a minute."""
    query, key, value = (torch.randn(1, 2, rows, 8) for rows in (1, 40, 40))
    for tensor in (key, value):
        torch._dynamo.mark_dynamic(tensor, 2)
    found: Any = torch.compile(flex_attention)(query, key, value)
    return torch.allclose(found, scaled_dot_product_attention(query, key, value), atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler: torch compiles flex_attention with it"
)
def test_compiled_flex_attention_tells_the_same_story(data: Path) -> None:
    """With a dynamic cache alone: what torch 2.13 makes for processors of a prompt in a static one may not compile.

    On processors without AVX-512 it gives wrong logits to a single row (off by 8 where float32 is off by 1e-5).
    """
    wrong = "what torch compiles for this processor says other things than sdpa, without drafts too"
    if not single_rows_are_right():
        pytest.skip(wrong)
    model = stories(data, torch.float32, "flex_attention")
    ids = story_ids(data)
    expected = plain(model, ids, max_new_tokens=160)
    if not torch.equal(expected, plain(stories(data, torch.float32, "sdpa"), ids, max_new_tokens=160)):
        pytest.skip(wrong)
    watched = Watched()
    drafter = Prophet(512, [[*expected[0].tolist(), *range(8)]], error_rate=0.3)
    assert torch.equal(drafted(model, drafter, ids, max_new_tokens=160, **watched.options), expected)
    assert watched.tally.accepted_length > 2


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_architectures_that_take_trees(architecture: str, attention: str, cache: str) -> None:
    model = tiny(architecture, vocab_size=VOCAB, attention=attention)
    expected = plain(model, cache_implementation=cache)
    for drafter in (prophet(expected), OverBudget(VOCAB), None):
        watched = Watched()
        output = drafted(model, drafter, cache_implementation=cache, **watched.options)
        assert torch.equal(output, expected)
        assert watched.name == "TreeForward"
    assert len(set(expected[0].tolist())) > 5


@pytest.mark.parametrize("prompt", [3, 20])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("stablelm", {}),
    ],
)
def test_what_takes_no_trees_gets_one_chain(architecture: str, changes: dict[str, Any], prompt: int) -> None:
    """Windows that the prompt fills, or the output; layers with and without one; a model without masks of one's own."""
    model = tiny(architecture, vocab_size=VOCAB, **changes)
    ids = (torch.arange(prompt)[None] * 7) % VOCAB
    expected = plain(model, ids, return_dict_in_generate=True)
    for drafter in (prophet(expected.sequences), RandomTrees(VOCAB), None):
        watched = Watched()
        output = drafted(model, drafter, ids, return_dict_in_generate=True, **watched.options)
        assert torch.equal(output.sequences, expected.sequences)
        assert watched.name == "ChainForward"
        assert isinstance(drafter, Prophet) <= (watched.tally.accepted_length > 1.5)
        for layer, other in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(layer.keys, other.keys)
            torch.testing.assert_close(layer.values, other.values)
            assert layer.get_seq_length() == other.get_seq_length() == expected.sequences.shape[1] - 1
            assert not getattr(layer, "record_past", False)


def test_a_sliding_window_with_a_cache_that_slides_not() -> None:
    model = tiny("mistral", vocab_size=VOCAB, sliding_window=8)
    expected = plain(model)
    watched = Watched()
    output = drafted(model, prophet(expected), past_key_values=DynamicCache(), **watched.options)
    assert torch.equal(output, expected)
    assert watched.name == "ChainForward"


def test_a_cache_that_cannot_go_back_serves_decoding_without_drafts() -> None:
    model = tiny("mistral", vocab_size=VOCAB, sliding_window=8)
    expected = plain(model, cache_implementation="static")
    assert torch.equal(drafted(model, None, cache_implementation="static"), expected)
    with pytest.raises(
        DecodingError, match=r"StaticSlidingWindowLayer cannot take back .* use a DynamicCache"
    ):
        drafted(model, Silent(VOCAB), cache_implementation="static")


def test_an_argument_that_only_the_model_knows_is_no_obstacle() -> None:
    """It might be as long as the text, so the model is called as plain generate calls it, with a chain."""
    model = tiny(vocab_size=VOCAB)
    expected = plain(model)
    watched = Watched()
    output = drafted(model, prophet(expected), output_router_logits=False, **watched.options)
    assert torch.equal(output, expected)
    assert watched.name == "ChainForward"
    assert watched.tally.accepted_length > 1.5


# --- prompts ---


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_left_padding(attention: str, cache: str) -> None:
    """The drafter is not shown the padding. In float64, `eager` gives NaN at padding, plainly too."""
    dtype = torch.float32 if attention == "eager" else torch.float64
    model = tiny(vocab_size=VOCAB, attention=attention, dtype=dtype)
    with uncompiled():
        expected = plain(model, max_new_tokens=16)
        drafter = prophet(expected)
        options = {"attention_mask": MASK, "cache_implementation": cache, "max_new_tokens": 16}
        output = drafted(model, drafter, PADDED, **options)
    assert output[0, 3:].tolist() == expected[0].tolist()
    assert drafter.text == expected[0].tolist()
    assert drafter.moved > 0


def test_padding_in_a_sliding_window() -> None:
    model = tiny("mistral", vocab_size=VOCAB, sliding_window=8)
    expected = plain(model, PADDED, attention_mask=MASK)
    drafter = prophet(expected, start=3)
    assert torch.equal(drafted(model, drafter, PADDED, attention_mask=MASK), expected)
    assert drafter.text == expected[0, 3:].tolist()


@pytest.mark.parametrize("whole", [True, False])
def test_a_cache_of_the_users(whole: bool) -> None:
    """It holds the beginning of the prompt; the prompt is given whole, or without what is in the cache."""
    model = tiny(vocab_size=VOCAB)
    expected = plain(model)
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=60)):
        with torch.no_grad():
            model(PROMPT[:, :3], past_key_values=cache, use_cache=True)
        ids = PROMPT if whole else PROMPT[:, 3:]
        drafter = prophet(expected, start=0 if whole else 3)
        output = drafted(model, drafter, ids, past_key_values=cache, attention_mask=torch.ones_like(PROMPT))
        assert output[0].tolist() == expected[0, 0 if whole else 3 :].tolist()
        assert drafter.moved > 0
        assert int(cache.get_seq_length()) == expected.shape[1] - 1


def test_a_prompt_of_embeddings() -> None:
    model: Any = tiny(vocab_size=VOCAB)
    embeddings = model.get_input_embeddings()(PROMPT)
    expected = model.generate(inputs_embeds=embeddings, do_sample=False, max_new_tokens=20)
    drafter = prophet(expected)
    output = generate(model, inputs_embeds=embeddings, drafter=drafter, do_sample=False, max_new_tokens=20)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, expected)
    assert drafter.moved > 0


def test_a_prompt_in_chunks() -> None:
    model = tiny(vocab_size=VOCAB)
    expected = plain(model)
    assert torch.equal(drafted(model, prophet(expected), prefill_chunk_size=2), expected)


# --- the end of caches and positions ---


def test_a_static_cache_is_used_to_its_end() -> None:
    model = tiny(vocab_size=VOCAB)
    expected = plain(model, max_new_tokens=12)
    cache = StaticCache(model.config, max_cache_len=PROMPT.shape[1] + 11)
    watched = Watched()
    output = drafted(model, OverBudget(VOCAB), past_key_values=cache, max_new_tokens=12, **watched.options)
    assert torch.equal(output, expected)
    assert int(cache.get_seq_length()) == cache.get_max_length()


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
    assert drafter.moved > 0


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 20,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


def test_the_depth_of_drafts() -> None:
    limit = depth_limit(tiny(max_position_embeddings=100))
    assert [limit(position) for position in (0, 90, 98, 99, 100, 500)] == [99, 9, 1, 0, 0, 0]
    limit = depth_limit(build(max_position_embeddings=100, rope_parameters=LONGROPE))
    assert [limit(position) for position in (0, 18, 19, 20, 99)] == [19, 1, 0, 79, 0]


def test_a_rotation_that_changes_on_the_way() -> None:
    for kind in (LONGROPE, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}):
        size = 100 if kind is LONGROPE else 20
        model = build(vocab_size=VOCAB, max_position_embeddings=size, rope_parameters=kind)
        expected = plain(model)
        drafter = prophet(expected)
        assert torch.equal(drafted(model, drafter), expected)
        assert drafter.moved > 0


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2, expected 1"),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            "ask for contrastive_search, expected greedy search or sampling",
        ),
        ({"prompt_lookup_num_tokens": 3}, "ask for assisted_generation"),
        ({"use_cache": False}, "use_cache is off, as an argument .* pass use_cache=True"),
        ({"output_attentions": True}, "output_attentions is set"),
        ({"assistant_model": tiny}, "assistant_model is set, expected none"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        generate(tiny(attention="eager"), PROMPT, drafter=Silent(64), max_new_tokens=4, **options)


def test_an_encoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    make: Any = T5Config
    config = make(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(DecodingError, match="T5ForConditionalGeneration has an encoder"):
        generate(T5ForConditionalGeneration(config), PROMPT, drafter=Silent(64), max_new_tokens=4)


@pytest.mark.parametrize("architecture", ["mamba", "rwkv", "falcon_h1"])
def test_linear_attention_is_refused(architecture: str) -> None:
    with pytest.raises(DecodingError, match="linear attention, whose state cannot take back"):
        generate(tiny(architecture, attention="eager"), PROMPT, drafter=Silent(64), max_new_tokens=4)


def test_a_quantized_cache_is_refused() -> None:
    model = tiny(dtype=torch.float32)
    cache = QuantizedCache("fp8", model.config)
    with pytest.raises(DecodingError, match="QuantizedCache of Fp8QuantizedLayer cannot take back"):
        generate(model, PROMPT, drafter=Silent(64), past_key_values=cache, max_new_tokens=4)


def test_a_token_that_the_model_does_not_know_is_named() -> None:
    class Foreign(Silent):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            return tree_of([(3, VOCAB)])

    with pytest.raises(
        DecodingError, match=f"proposes token {VOCAB}, expected an id .* below {VOCAB}: .*tokenizer"
    ):
        drafted(tiny(vocab_size=VOCAB), Foreign(VOCAB))


# --- what fails on the way ---


def test_a_streamer_that_fails_leaves_a_cache_that_can_be_used() -> None:
    """It fails inside an accepted block: the rows of the whole pass are taken out."""

    class Failing(BaseStreamer):
        calls = 0

        def put(self, value: torch.Tensor) -> None:
            self.calls += 1
            if self.calls == 5:
                raise OSError("the reader is gone")

        def end(self) -> None:
            raise AssertionError("not reached")

    model = tiny(vocab_size=VOCAB)
    expected = plain(model)
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=60)):
        with pytest.raises(OSError, match="the reader is gone"):
            drafted(model, prophet(expected), past_key_values=cache, streamer=Failing())
        length = int(cache.get_seq_length())
        assert PROMPT.shape[1] <= length < PROMPT.shape[1] + 4
        output = drafted(
            model,
            prophet(expected),
            expected[:, : length + 1],
            past_key_values=cache,
            max_new_tokens=expected.shape[1] - length - 1,
        )
        assert torch.equal(output, expected)


def test_flex_attention_leaves_nothing_on_the_model() -> None:
    class Broken(Silent):
        def propose(self, budget: int = 64, min_prob: float = 0.0) -> DraftTree:
            raise OSError("no drafts today")

    model = tiny(vocab_size=VOCAB, attention="flex_attention")
    with uncompiled(), pytest.raises(OSError, match="no drafts today"):
        drafted(model, Broken(VOCAB), cache_implementation="static")
    assert "create_masks_for_generate" not in vars(model)


# --- the seam ---


def test_drafts_are_cut_to_the_room_of_a_pass() -> None:
    model = tiny(vocab_size=VOCAB)
    sizes: list[int] = []

    def narrow(prefilled: Prefilled) -> Forward:
        forward = default_forward(prefilled)
        cast(Any, forward).room = lambda: 2
        return forward

    output = drafted(
        model, RandomTrees(VOCAB), forward=narrow, on_step=lambda step: sizes.append(len(step.tree))
    )
    assert torch.equal(output, plain(model))
    assert max(sizes) == 2


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
    model.generate(
        PROMPT,
        custom_generate=speculative_generate,
        drafter=prophet(expected),
        token_streamer=streamer,
        do_sample=False,
        max_new_tokens=4,
    )
    assert streamer.values == [PROMPT[0].tolist(), *expected[0, 5:, None].tolist(), []]
