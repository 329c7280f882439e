"""Which models take drafts: families whose texts are the same with drafts, and how others are refused."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import T5Config, T5ForConditionalGeneration

from draftstore.decoding.budget import Fixed
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.request import RequestDrafter
from draftstore.errors import DecodingError
from draftstore.hf import exactness, generate
from draftstore.hf.attention import FULL, SLIDING, CausalMask
from draftstore.hf.batches import Batch
from draftstore.hf.exactness import PROMPT as READ
from draftstore.hf.exactness import examine, require_exact
from draftstore.hf.generation import decode_all
from draftstore.hf.members import prepare_text
from tests.fakes.adversaries import Prophets, Silent
from tests.fakes.hf_models import build, tiny

VOCAB = 48
PROMPT = torch.tensor([[5, 7, 11, 13, 17]])

WINDOWS: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 32},
    "gemma2": {"sliding_window": 32, "attention": "eager"},
    "gemma3_text": {"sliding_window": 32, "layer_types": [SLIDING, FULL]},
    "olmo3": {"sliding_window": 32, "num_hidden_layers": 4},
    "cohere2": {"sliding_window": 32, "num_hidden_layers": 4},
    "exaone4": {"sliding_window": 32, "num_hidden_layers": 4, "sliding_window_pattern": 4},
    "llama4_text": {
        "attention_chunk_size": 32, "num_hidden_layers": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "qwen2": {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
}  # fmt: skip
SMALL = (
    "apertus", "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "gpt_neox", "granite", "helium", "nemotron",
    "olmo", "olmo2", "opt", "persimmon", "phi", "seed_oss", "smollm3", "starcoder2",
)  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "dtype": torch.float32,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe"), MIXTURE),
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "deepseek_v3": LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
}
MOSHI: dict[str, Any] = {"sliding_window": 8, "ffn_dim": 64, "audio_vocab_size": 8}


def plain_text(model: Any, ids: torch.Tensor, count: int, **options: Any) -> Any:
    return model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0, **options)


def require_the_same(model: Any, length: int, count: int) -> None:
    """Check that texts alone and together are those of plain generate, whoever drafts."""
    prompts = torch.randint(1, VOCAB, (3, length), generator=torch.Generator().manual_seed(3))
    expected = plain_text(model, prompts, count)
    for ids, text in ((prompts, expected), (prompts[:1], expected[:1])):
        prophets = Prophets(VOCAB, text.tolist(), error_rate=0.3)
        for drafter in (prophets, RequestDrafter(VOCAB)):
            require(model, ids, drafter, text.tolist(), max_new_tokens=count)
        assert all(each.moved > 1 for each in prophets.sessions)


def require(
    model: Any, ids: torch.Tensor, drafter: Drafter, expected: list[list[int]], **options: Any
) -> None:
    found = generate(model, ids, drafter=drafter, do_sample=False, pad_token_id=0, **options)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == expected


def quick(names: Iterable[str], few: Container[str]) -> list[Any]:
    """Return names as parameters of a test, of which all but a few are slow."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("architecture", quick(WINDOWS, ("gemma3_text",)))
def test_families_give_the_same_text_beyond_their_windows(architecture: str) -> None:
    """Of 32 tokens, in texts of 200."""
    model = build(architecture, vocab_size=VOCAB, **WINDOWS[architecture])
    require_the_same(model, 60, 140)


@pytest.mark.parametrize(
    "architecture", quick({**dict.fromkeys(SMALL), **OTHERS}, ("mixtral", "opt", "deepseek_v3"))
)
def test_other_families_give_the_same_text(architecture: str) -> None:
    model = build(architecture, vocab_size=VOCAB, **({"attention": "eager"} | OTHERS.get(architecture, {})))
    found = examine(model)
    assert not found.fault
    assert found.deviation is not None
    assert found.deviation < 0.02 * found.tolerance
    require_the_same(model, 5, 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(dtype: torch.dtype) -> None:
    found = examine(build("qwen3", vocab_size=VOCAB, dtype=dtype, spread=0.1))
    assert found.fault == ""
    assert found.deviation is not None
    assert found.deviation < found.tolerance


def encoder() -> Any:
    make: Any = T5Config
    return T5ForConditionalGeneration(
        make(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


def of(architecture: str, attention: str = "eager", /, **changes: Any) -> Callable[[], Any]:
    return lambda: build(architecture, vocab_size=VOCAB, attention=attention, **changes)


STATE = "has linear attention layers or another state that cannot be rolled back"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder": (encoder, "has an encoder"),
    "flex_attention": (of("llama", "flex_attention"), "uses the attention 'flex_attention': load it with 'sdpa'"),
    "mamba": (of("mamba"), STATE),
    "rwkv": (of("rwkv"), STATE),
    "falcon_h1": (of("falcon_h1"), STATE),
    "qwen3_next": (of("qwen3_next"), STATE),
    "mpt": (of("mpt", d_model=32, n_heads=4, n_layers=2), "fails in a pass over a draft|computes other logits"),
    "bloom": (of("bloom", n_head=4, n_layer=2), "fails in a pass over a draft|computes other logits"),
    "cpmant": (of("cpmant", dim_head=8, dim_ff=64), "fails in a pass over a draft|computes other logits"),
    "openai-gpt": (of("openai-gpt", n_embd=32, n_layer=2, n_head=4, n_positions=64), "fails in a pass over a draft"),
    "moshi": (of("moshi", **MOSHI), "ignores its sliding window"),
    "doge": (of("doge", keep_window_size=8), r"only to the keys with the highest scores \(keep_window_size\)"),
    "deepseek_v32": (
        of("deepseek_v32", **LATENT, index_topk=8, index_n_heads=2, index_head_dim=8), STATE
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_take_no_drafts(name: str) -> None:
    make, words = REFUSED[name]
    model = make()
    with pytest.raises(DecodingError, match=rf"{type(model).__name__} .*({words}).*, so it takes no drafts"):
        Batch(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4, "original_max_position_embeddings": 20,
        },
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_models_that_take_one_text_at_a_time(rope: dict[str, Any]) -> None:
    """Their rotations depend on the longest text of a pass, and change on the way here."""
    size = 20 if rope["rope_type"] == "dynamic" else 100
    model = build(vocab_size=VOCAB, max_position_embeddings=size, rope_parameters=rope)
    assert Batch(model).most == 1
    prompts = torch.tensor([[5, 7, 11], [3, 3, 9]])
    texts = [plain_text(model, prompts[row : row + 1], 30)[0].tolist() for row in range(2)]

    require(model, prompts, Prophets(VOCAB, texts, 0.1), texts, max_new_tokens=30)

    long = torch.arange(1, 37)[None]  # in one pass, since its end decides how its beginning is rotated
    first, second = (
        build(vocab_size=VOCAB, max_position_embeddings=size, rope_parameters=rope) for _ in "12"
    )
    member = prepare_text(first, long, max_new_tokens=9, do_sample=False).draft(None, Fixed(0))
    decode_all(Batch(first, tokens=2000, chunk=8), [member], lambda _: None)
    assert member.text.ids.tolist() == plain_text(second, long, 9)[0].tolist()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="before 5.20, plain generate drops the cache there, and reads only the last token anew",
)
@pytest.mark.parametrize("length", [28, 31, 32])
def test_a_text_is_read_anew_where_plain_generate_does_so(length: int) -> None:
    """Phi 3 drops its cache where the rotation of all positions changes."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=32)
    prompt = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(3))
    text = plain_text(model, prompt, 20)[0].tolist()
    drafter = Prophets(64, [[*text, *range(8)]], 0.2)
    output: Any = generate(model, prompt, drafter=drafter, max_new_tokens=20, do_sample=False)
    assert output[0].tolist() == text


def test_passes_that_differ_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the help of the configuration: this window is shorter than the text of the check."""
    monkeypatch.setattr(exactness, "unsupported_reason", lambda _model: None)
    found = examine(of("doge", keep_window_size=8)())
    assert found.deviation is not None
    assert found.deviation > 0.1
    assert "computes other logits" in found.fault


def test_prompts_read_alone_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(vocab_size=VOCAB, dtype=torch.float32)
    assert not examine(model).fault
    monkeypatch.setattr(CausalMask, "last", lambda mask, rows: torch.zeros(1, 1, rows, mask.shape[3]))
    assert "computes other logits" in examine(model).fault


@pytest.mark.parametrize("mask", [-1e4, -1e9, -torch.inf])
@pytest.mark.parametrize("wrong", [False, True])
def test_logits_that_a_model_masks_itself_do_not_count(mask: float, wrong: bool) -> None:
    """They neither hide what differs beside them nor make a model differ."""
    model: Any = build(vocab_size=VOCAB, dtype=torch.float32)

    def masked(_head: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        if wrong and logits.shape[1] > 1:
            logits[..., 0] += 0.1 * (logits.amax() - logits.amin())
        logits[..., VOCAB // 2 :] = mask
        return logits

    model.lm_head.register_forward_hook(masked)
    found = examine(model)
    assert ("computes other logits" in found.fault) == wrong
    assert found.deviation is not None
    assert (found.deviation > 0.01) == wrong


def test_in_training_nothing_is_checked() -> None:
    """Dropout makes every pass another."""
    model: Any = build(vocab_size=VOCAB).train()
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    require_exact(model)
    assert passes == []


def test_a_model_under_autocast_takes_drafts() -> None:
    model = build(vocab_size=VOCAB, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert examine(model).fault == ""


def test_a_models_own_settings_do_not_end_the_check() -> None:
    own = {"eos_token_id": [*range(VOCAB)], "stop_strings": ["x"], "max_time": 1e-9}
    model: Any = build(vocab_size=VOCAB)
    model.generation_config.update(**own)
    assert examine(model).fault == ""
    assert model.generation_config.to_dict().items() >= own.items()


def test_a_model_that_fails_in_the_check_is_refused() -> None:
    model: Any = build(vocab_size=VOCAB)

    def choosy(_model: Any, _inputs: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == READ:
            raise RuntimeError("not this text")

    model.register_forward_pre_hook(choosy, with_kwargs=True)
    with pytest.raises(DecodingError, match=r"cannot be decoded at all: .* \(RuntimeError: not this text\)"):
        generate(model, PROMPT, drafter=Silent(VOCAB), max_new_tokens=2)


def test_a_model_that_leaves_the_cache_off_is_decoded_with_one() -> None:
    model: Any = tiny(vocab_size=VOCAB, use_cache=False)
    require(model, PROMPT, Silent(VOCAB), plain_text(model, PROMPT, 9).tolist(), max_new_tokens=9)
