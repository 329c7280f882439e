"""The check that drafts do not change what a model says: which models pass it, and how others are refused."""

import gc
from typing import Any

import pytest
import torch

from draftstore.errors import DecodingError
from draftstore.hf import exactness, generate
from draftstore.hf.exactness import PROMPT as READ
from draftstore.hf.exactness import examine
from tests.fakes.adversaries import Prophet, Silent
from tests.fakes.hf_models import build, tiny

VOCAB = 48
PROMPT = torch.tensor([[5, 7, 11, 13, 17]])
PASSES = 9
"""Two prefills, five tokens one by one, a draft and a token."""

TREES = (
    "apertus", "arcee", "cohere", "deepseek_v3", "ernie4_5", "gemma", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox",
    "granite", "helium", "llama", "nemotron", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
CHAINS = (
    "bloom", "cohere2", "exaone4", "gemma3_text", "gptj", "llama4_text", "mistral", "olmo3", "stablelm",
)  # fmt: skip
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")
LATENT = {
    "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def changes(architecture: str) -> dict[str, Any]:
    """Return what a family needs beside the usual to be small."""
    match architecture:
        case "mistral":
            return {"sliding_window": 8}
        case "opt":
            return {"word_embed_proj_dim": 32, "ffn_dim": 64}
        case "gptj":
            return {"rotary_dim": 4}
        case "deepseek_v3":
            return LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    if architecture in MIXTURES:
        return {
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        }
    return {}


def plain_and_drafted(model: Any, **options: Any) -> tuple[list[int], list[int]]:
    told = model.generate(PROMPT, do_sample=False, max_new_tokens=24, **options)[0].tolist()
    drafter = Prophet(VOCAB, [[*told, *range(8)]], error_rate=0.2)
    output = generate(model, PROMPT, drafter=drafter, do_sample=False, max_new_tokens=24, **options)
    assert isinstance(output, torch.Tensor)
    return told, output[0].tolist()


@pytest.mark.parametrize("architecture", [*TREES, *CHAINS, *MIXTURES])
def test_families_that_are_exact(architecture: str) -> None:
    dtype = torch.float32 if architecture in MIXTURES else torch.float64
    model = build(architecture, vocab_size=VOCAB, dtype=dtype, attention="eager", **changes(architecture))
    found = examine(model)
    assert not found.fault
    assert found.deviation is not None
    assert found.deviation < 0.02 * found.tolerance
    assert found.trees == (architecture not in CHAINS)
    told, drafted = plain_and_drafted(model)
    assert told == drafted
    if found.trees:
        require_rows(model, told)


def require_rows(model: Any, told: list[int]) -> None:
    """Check that a batch with another text beside it has the same row."""
    other = model.generate(PROMPT[:, :2], do_sample=False, max_new_tokens=24)[0].tolist()
    inputs = torch.cat([PROMPT, torch.tensor([[3, 3, 3, 5, 7]])])
    mask = torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    texts = [[*told, *range(8)], [*other, *range(8)]]

    class Drafters:
        def session(self, prompt_ids: Any, **prefill: Any) -> Any:
            return Prophet(VOCAB, texts, error_rate=0.2).session(prompt_ids)

    rows: Any = generate(
        model, inputs, attention_mask=mask, drafter=Drafters(), do_sample=False, max_new_tokens=24
    )
    assert rows[0].tolist() == told
    assert rows[1, 3:].tolist() == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(dtype: torch.dtype) -> None:
    found = examine(build("qwen3", vocab_size=VOCAB, dtype=dtype, spread=0.1))
    assert (found.fault, found.trees) == ("", True)
    assert found.deviation is not None
    assert found.deviation < found.tolerance


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("cpmant", {"dim_head": 8, "dim_ff": 64}, f"holds 44 tokens in its cache after it has read {READ}"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, "keeps no cache of a text"),
        ("moshi", {"sliding_window": 8, "ffn_dim": 64, "audio_vocab_size": 8}, "without regard to its sliding window"),
        ("doge", {"keep_window_size": 8}, "keep_window_size"),
        (
            "deepseek_v32",
            {**LATENT, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
            "index_topk",
        ),
    ],
)  # fmt: skip
def test_families_that_are_refused(architecture: str, changes: dict[str, Any], words: str) -> None:
    model = build(architecture, vocab_size=VOCAB, attention="eager", **changes)
    with pytest.raises(DecodingError, match=words):
        generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=4)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("moshi", {"sliding_window": 8, "ffn_dim": 64, "audio_vocab_size": 8}),
        ("doge", {"keep_window_size": 8}),
    ],
)
def test_passes_that_differ_are_seen(
    architecture: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the help of the configuration: these windows are shorter than the text of the check."""
    monkeypatch.setattr(exactness, "_by_design", lambda _config: "")
    found = examine(build(architecture, vocab_size=VOCAB, attention="eager", **changes))
    assert found.deviation is not None
    assert found.deviation > 0.1
    assert "computes other logits" in found.fault


def test_a_model_is_checked_once_and_forgotten_with_it() -> None:
    model: Any = build(vocab_size=VOCAB)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    before = len(exactness._KNOWN)
    state = torch.random.get_rng_state()
    generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=1)
    assert len(passes) == PASSES + 1
    assert torch.equal(torch.random.get_rng_state(), state)
    generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=1)
    assert len(passes) == PASSES + 2
    assert len(exactness._KNOWN) == before + 1
    del model
    gc.collect()
    assert len(exactness._KNOWN) == before


def test_without_drafts_or_in_training_nothing_is_checked() -> None:
    model: Any = build(vocab_size=VOCAB)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    generate(model, PROMPT, max_new_tokens=1)
    generate(model.train(), PROMPT, drafter=Silent(VOCAB), max_new_tokens=1)
    assert len(passes) == 2


def test_a_model_that_cannot_be_checked_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build(vocab_size=VOCAB)

    def choosy(_model: Any, _inputs: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == READ:
            raise RuntimeError("not this text")

    model.register_forward_pre_hook(choosy, with_kwargs=True)
    generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=2)
    assert "could not be checked" in caplog.text
    assert "not this text" in caplog.text


def test_a_model_that_leaves_the_cache_off_says_so_and_decodes_with_it() -> None:
    model: Any = tiny("mpt", attention="eager", vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2)
    with pytest.raises(DecodingError, match=r"in the settings of MptForCausalLM, .* pass use_cache=True"):
        generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=4)
    told, drafted = plain_and_drafted(model, use_cache=True)
    assert told == drafted
