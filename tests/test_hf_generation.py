"""Generation with drafts on every kind of model, attention and cache: which are served how, and which are refused.

What a request may ask for is tested in `test_hf_behaviour`, sampling in `test_hf_sampling`.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from draftstore.acceptance import Acceptance
from draftstore.decoding import Tally
from draftstore.errors import DecodingError
from draftstore.hf import ModelTarget, generate, speculative_generate
from draftstore.hf.caches import GrowingMemory, StaticMemory, memory_of
from draftstore.hf.checks import depth_limit
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.generation import default_forward
from draftstore.hf.limits import best_chain, cut_depth
from draftstore.hf.masks import attention_bias, block_mask, padding_bias, shape_of
from draftstore.hf.targets import Forward, Pass, Prefilled, Rows, Wants
from draftstore.tree import DraftTree
from tests.adversaries import Adversary, OverBudget, Prophet, RandomTrees, Silent, tree_of
from tests.hf_models import ATTENTION, STORIES, stories, story_ids, tiny, uncompiled

VOCAB = 48
PROMPT = torch.tensor([[5, 7, 11, 13, 17]])


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
    length = 24 if flexible else 60  # what is not compiled is slow
    watched = Watched()
    with uncompiled():
        for story in STORIES[: 1 if flexible else 3]:
            ids = story_ids(data, story)
            made = None if flexible else cache
            expected = plain(model, ids, max_new_tokens=length, cache_implementation=made)
            for make in DRAFTERS.values():
                drafter = make([[*expected[0].tolist(), *range(8)]])
                output = drafted(
                    model, drafter, ids, max_new_tokens=length, cache_implementation=cache, **watched.options
                )
                assert torch.equal(output, expected)
    assert watched.name == "TreeForward"
    assert watched.tally.accepted > watched.tally.passes / 3


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="no C++ compiler: torch compiles flex_attention with it"
)
def test_compiled_flex_attention_tells_the_same_story(data: Path) -> None:
    model = stories(data, torch.float32, "flex_attention")
    ids = story_ids(data)
    expected = plain(model, ids, max_new_tokens=160)
    watched = Watched()
    for cache in ("dynamic", "static"):
        drafter = Prophet(512, [[*expected[0].tolist(), *range(8)]], error_rate=0.3)
        output = drafted(
            model, drafter, ids, max_new_tokens=160, cache_implementation=cache, **watched.options
        )
        assert torch.equal(output, expected)
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
        DecodingError, match="StaticSlidingWindowLayer cannot take back .* use a DynamicCache"
    ):
        drafted(model, Silent(VOCAB), cache_implementation="static")


def test_an_argument_that_only_the_model_knows_is_no_obstacle() -> None:
    """It might be as long as the text, so the model is called as plain generate calls it, with a chain."""
    model = tiny(vocab_size=VOCAB)
    expected = plain(model, output_attentions=False, scaling_of_no_one=None)
    watched = Watched()
    drafter = prophet(expected)
    output = drafted(model, drafter, token_type_ids=None, **watched.options)
    assert torch.equal(output, expected)
    assert watched.name == "TreeForward"


# --- prompts ---


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_left_padding(attention: str, cache: str) -> None:
    """The text is that of the prompt without padding, and the drafter is not shown the padding."""
    model = tiny(vocab_size=VOCAB, attention=attention)
    padded = torch.cat([torch.full((1, 3), 2), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with uncompiled():
        expected = plain(model, max_new_tokens=16)
        drafter = prophet(expected)
        output = drafted(
            model, drafter, padded, attention_mask=mask, cache_implementation=cache, max_new_tokens=16
        )
    assert output[0, 3:].tolist() == expected[0].tolist()
    assert drafter.text == expected[0].tolist()
    assert drafter.moved > 0


def test_padding_in_a_sliding_window() -> None:
    model = tiny("mistral", vocab_size=VOCAB, sliding_window=8)
    padded = torch.cat([torch.full((1, 3), 2), PROMPT], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    expected = plain(model, padded, attention_mask=mask)
    drafter = prophet(expected, start=3)
    assert torch.equal(drafted(model, drafter, padded, attention_mask=mask), expected)
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
    depths: list[int] = []
    output = drafted(
        model,
        prophet(expected, error_rate=0.0),
        max_new_tokens=19,
        on_step=lambda step: depths.append(int(step.tree.depths.max(initial=0))),
    )
    assert torch.equal(output, expected)
    left = expected.shape[1] - PROMPT.shape[1]
    for depth in depths:
        assert depth < left or depth == 0
        left -= depth + 1 if depth else 1


def test_the_depth_of_drafts() -> None:
    limit = depth_limit(tiny(max_position_embeddings=100))
    assert [limit(position) for position in (0, 90, 98, 99, 100, 500)] == [99, 9, 1, 0, 0, 0]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    limit = depth_limit(tiny(max_position_embeddings=100, rope_parameters=rope))
    assert [limit(position) for position in (0, 18, 19, 20, 99)] == [19, 1, 0, 79, 0]


def test_a_rotation_that_changes_on_the_way() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    for kind in (rope, {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}):
        model = tiny(
            vocab_size=VOCAB, max_position_embeddings=100 if kind is rope else 20, rope_parameters=kind
        )
        expected = plain(model)
        drafter = prophet(expected)
        assert torch.equal(drafted(model, drafter), expected)
        assert drafter.moved > 0


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams is 2, expected 1"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2.* once for each"),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            "ask for contrastive_search, expected greedy search or sampling",
        ),
        ({"prompt_lookup_num_tokens": 3}, "ask for assisted_generation"),
        ({"use_cache": False}, "decodes without a cache, expected use_cache=True"),
        ({"output_attentions": True}, "output_attentions is set"),
        ({"assistant_model": tiny}, "assistant_model drafts in plain generate"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodingError, match=message):
        generate(tiny(attention="eager"), PROMPT, drafter=Silent(64), **options)


def test_a_batch_is_refused() -> None:
    with pytest.raises(DecodingError, match="a batch of 3 texts, expected 1: call generate once for each"):
        generate(tiny(), PROMPT.expand(3, -1), drafter=Silent(64))


def test_an_encoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(DecodingError, match="T5ForConditionalGeneration has an encoder"):
        generate(T5ForConditionalGeneration(config), PROMPT, drafter=Silent(64))


@pytest.mark.parametrize("architecture", ["mamba", "rwkv", "falcon_h1"])
def test_linear_attention_is_refused(architecture: str) -> None:
    with pytest.raises(DecodingError, match="linear attention, whose state cannot take back"):
        generate(tiny(architecture, attention="eager"), PROMPT, drafter=Silent(64))


def test_a_quantized_cache_is_refused() -> None:
    model = tiny(dtype=torch.float32)
    cache = QuantizedCache("fp8", model.config)
    with pytest.raises(DecodingError, match="QuantizedCache of Fp8QuantizedLayer cannot take back"):
        generate(model, PROMPT, drafter=Silent(64), past_key_values=cache)


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
    model = tiny(vocab_size=VOCAB, attention="flex_attention")
    with uncompiled(), pytest.raises(DecodingError):
        drafted(model, Silent(VOCAB), cache_implementation="static", output_attentions=True)
    assert "create_masks_for_generate" not in vars(model)


# --- a forward pass of one's own ---


class TableForward:
    """A `Forward` without a model: row r says the token of row r plus one."""

    trees = True

    def __init__(self) -> None:
        self.kept: list[list[int]] = []

    def room(self) -> int | None:
        return 3

    def run(self, tokens: Any, tree: DraftTree, wants: Wants) -> Pass:
        logits = torch.nn.functional.one_hot(torch.from_numpy(tokens + 1) % 16, 16).double()
        return Rows(logits, wants)

    def keep(self, rows: Any) -> None:
        self.kept.append(list(rows))

    def close(self) -> None:
        self.kept.append([-1])


def test_a_target_over_a_forward_pass_of_ones_own() -> None:
    text = Text(torch.tensor([[3, 4]]))
    forward = TableForward()
    target = ModelTarget(forward, Chooser(text, []), text, vocab_size=16)
    target.ask(candidates=True, hidden=True)
    verdict = target.verify(tree_of([(9,), (5, 6), (5, 1)]))
    assert [verdict.choose(row, []) for row in range(5)] == [5, 10, 6, 2, 7]
    candidates = verdict.candidates()
    assert candidates is not None
    assert candidates.shape == (5, 8)
    assert candidates[:, 0].tolist() == [5, 10, 6, 2, 7]
    assert verdict.hidden(0) is None
    target.keep(Acceptance([1, 3], np.array([5, 6, 7], np.int32)))
    assert text.ids == [3, 4, 5, 6, 7]
    target.verify(DraftTree.empty())
    target.close()
    assert forward.kept == [[0, 2, 4], [], [-1]]


def test_drafts_are_cut_to_the_room_of_a_pass() -> None:
    model = tiny(vocab_size=VOCAB)
    sizes: list[int] = []

    def narrow(prefilled: Prefilled) -> Forward:
        forward: Any = default_forward(prefilled)
        forward.room = lambda: 2
        return forward

    output = drafted(
        model, RandomTrees(VOCAB), forward=narrow, on_step=lambda step: sizes.append(len(step.tree))
    )
    assert torch.equal(output, plain(model))
    assert max(sizes) == 2


def test_fewer_ids_than_candidates() -> None:
    rows = Rows(torch.tensor([[0.0, 2.0, 1.0]]), Wants(candidates=True))
    assert rows.candidates().tolist() == [[1, 2, 0, -1, -1, -1, -1, -1]]
    assert rows.best() == [1]


# --- parts ---


def random_tree(size: int, seed: int) -> DraftTree:
    random = np.random.default_rng(seed)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) <= size:
        path = (*paths[int(random.integers(0, len(paths)))], int(random.integers(0, 500)))
        paths += [path] if path not in paths else []
    return tree_of(paths[1:])


@pytest.mark.parametrize("size", [0, 1, 5, 40, 140])
def test_the_mask_of_a_pass(size: int) -> None:
    tree = random_tree(size, seed=size)
    past, width = 37, 37 + size + 1 + 10
    like = torch.empty(0, dtype=torch.float64)
    shape = shape_of(tree)
    assert shape.offsets.tolist() == tree.position_offsets().tolist()
    expected = torch.ones(size + 1, width, dtype=torch.bool)
    expected[:, past + size + 1 :] = False
    expected[:, past : past + size + 1] = torch.from_numpy(tree.attention_mask())
    for padding in (0, 3):
        mask = torch.ones(1, past + 1, dtype=torch.int64)
        mask[0, :padding] = 0
        expected[:, :padding] = False
        hidden = padding_bias(mask, past, like)
        assert (hidden is None) == (padding == 0)
        bias = attention_bias(shape, past, width, hidden, like)
        assert bias.dtype == torch.float64
        assert bias.shape == (1, 1, size + 1, width)
        assert torch.equal(bias[0, 0] == 0, expected)
        assert torch.equal(bias[0, 0] == -torch.inf, ~expected)
        blocks: Any = block_mask(shape, past, width, hidden, like.device)
        assert blocks.shape == (1, 1, size + 1, width)
        rows, columns = torch.meshgrid(torch.arange(size + 1), torch.arange(width), indexing="ij")
        assert torch.equal(blocks.mask_mod(0, 0, rows, columns), expected)
        listed = blocks.to_dense()[0, 0].repeat_interleave(128, 0).repeat_interleave(128, 1) != 0
        assert not (expected & ~listed[: size + 1, :width]).any()


def filled(cache: DynamicCache | StaticCache, length: int) -> None:
    states = torch.arange(float(length)).view(1, 1, -1, 1).expand(1, 2, -1, 4)
    for layer in range(2):
        cache.update(states + 100 * layer, -states, layer)


@pytest.mark.parametrize("rows", [[], [0], [0, 1, 2, 3, 4], [0, 3], [0, 1, 4], [0, 2, 3, 4]])
def test_rows_are_taken_out_of_a_cache(rows: list[int]) -> None:
    config = tiny().config
    caches = (DynamicCache(config=config), StaticCache(config, max_cache_len=16))
    for cache, kind in zip(caches, (GrowingMemory, StaticMemory), strict=True):
        filled(cache, 6)
        memory = memory_of(cache)
        assert isinstance(memory, kind)
        assert (memory.length, memory.room()) == (6, None if kind is GrowingMemory else 10)
        filled(cache, 5)
        memory.keep(5, rows)
        assert memory.length == int(cache.get_seq_length()) == 6 + len(rows)
        layers: Any = cache.layers
        for place, layer in enumerate(layers):
            kept = layer.keys[0, 1, : memory.length, 3] - 100 * place
            assert kept.tolist() == [*range(6), *rows]
            assert layer.values[0, 0, : memory.length, 0].tolist() == (-kept).tolist()
        filled(cache, 1)
        assert int(cache.get_seq_length()) == 7 + len(rows)


def test_a_tree_is_cut_to_a_depth() -> None:
    tree = tree_of({(1,): 0.9, (1, 2): 0.8, (1, 2, 3): 0.7, (4,): 0.6, (4, 5): 0.5, (1, 2, 3, 6): 0.4})
    for depth in range(5):
        cut = cut_depth(tree, depth)
        cut.validate()
        paths = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
        assert {tuple(cut.tokens[cut.path(node)].tolist()) for node in range(len(cut))} == {
            path for path in paths if len(path) <= depth
        }
    assert cut_depth(tree, None) is tree


def test_the_chain_that_promises_most() -> None:
    """A long branch of likely tokens behind a less likely one."""
    tree = tree_of({(1,): 0.5, (1, 2): 0.1, (4,): 0.4, (4, 5): 0.39, (4, 5, 6): 0.38, (7,): 0.05})
    chain = best_chain(tree)
    chain.validate()
    assert chain.tokens.tolist() == [4, 5, 6]
    assert chain.parents.tolist() == [-1, 0, 1]
    for size in (1, 2, 30):
        chain = best_chain(random_tree(size, seed=size))
        assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
        chain.validate()


def test_a_text_gives_tensors_that_keep_their_content() -> None:
    prompt = torch.tensor([[1, 2]])
    text = Text(prompt)
    assert text.tensor() is not None
    views = [text.tensor([7, 8][:count]) for count in (1, 2)]
    text.extend([7, 8])
    for token in range(600):
        views.append(text.tensor([token]))
        text.extend([token])
    everything = [1, 2, 7, 8, *range(600)]
    assert all(view[0].tolist() == everything[: view.shape[1]] for view in views)
    assert prompt.tolist() == [[1, 2]]
    assert text.tensor()[0].tolist() == text.ids == everything


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
