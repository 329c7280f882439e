"""Families of models: the check and the public call say the same, and texts are those of plain `generate`.

All have random weights. Models of text and images get text alone, with the arguments that their processors add. (With
trained weights, Gemma 3 270M was decoded once beyond its window of 512: its 120 tokens were those of plain `generate`.)
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstore.errors import DecodingError
from draftstore.hf import generate, speculative_generate
from draftstore.hf.checks import TYPES
from draftstore.hf.generation import check_model
from draftstore.hf.loading import LoadedModel
from tests.fakes.adversaries import Prophets
from tests.fakes.hf_models import build, build_image_text

VOCAB = 64
PAGE = Path(__file__).parents[3] / "docs" / "decoding.md"
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
IMAGE_TEXT: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "gemma3", "internvl", "llava", "mistral3", "smolvlm", "llama4", "aria", "aya_vision", "deepseek_vl",
            "exaone4_5", "idefics3", "lighton_ocr", "llava_next", "llava_onevision",
        )
    },
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), MROPE),
    "gemma4": {
        "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0, "global_head_dim": 8, "pad_token_id": 0,
    },
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    **{name: LATENT | {"num_experts_per_tok": 2} for name in ("deepseek_v2", "deepseek_v3")},
    **{name: {"rotary_dim": 4} for name in ("codegen", "gptj")},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0, "global_head_dim": 8},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "moshi": {"sliding_window": 8, "ffn_dim": 64, "audio_vocab_size": 8},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "bloom": {"n_head": 4, "n_layer": 2},
    "cpmant": {"dim_head": 8, "dim_ff": 64},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "doge": {"keep_window_size": 8},
}  # fmt: skip
MORE = (
    "afmoe", "biogpt", "bitnet", "codegen", "ctrl", "deepseek_v2", "diffllama", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "fuyu", "glm4_moe", "granitemoeshared", "hunyuan_v1_dense", "hyperclovax", "jais2", "jetmoe", "lfm2",
    "ministral", "minimax_m2", "nanochat", "olmoe", "phimoe", "vaultgemma", "xglm", "bart", "bert", "camembert",
    "electra", "minimax", "qwen3_5_text", "recurrent_gemma", "roberta", "roformer", "trocr", "xlm",
)  # fmt: skip
QUICK = (
    "gptj", "bert", "deepseek_v2", "minimax", "roberta", "xlm",
    "gemma3", "gemma4", "internvl", "llava", "mistral3", "qwen2_vl",
)  # fmt: skip


def on_page() -> dict[str, bool]:
    """Return the families in the table of the page, and whether they take drafts."""
    found = dict[str, bool]()
    for row in re.findall(r"^\| (.*) \| (trees|refused) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        listed = re.sub(r"\([^)]*\)|[a-z ]+:|and others.*?(?=[,;]|$)|attention other.*", "", row[0])
        found |= {name.strip(): row[1] == "trees" for name in re.split("[,;]", listed) if name.strip()}
    return found


def loaded(model: Any) -> LoadedModel:
    none: Any = None
    return LoadedModel(model, none, none)


def quick(names: Iterable[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def greedily(run: Any, *given: Any, **options: Any) -> Any:
    return run(
        *given, do_sample=False, max_new_tokens=16, pad_token_id=0, eos_token_id=None, **options
    ).tolist()


@pytest.mark.parametrize("family", quick(IMAGE_TEXT))
def test_text_alone_to_a_model_that_also_reads_images(family: str) -> None:
    model: Any = build_image_text(family, vocab_size=VOCAB, **IMAGE_TEXT[family])
    assert check_model(loaded(model)).fault == ""
    ids = torch.randint(1, VOCAB - 1, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    known = inspect.signature(model.forward).parameters.keys() & set(TYPES)
    types = {name: torch.zeros_like(ids) for name in known}
    batch = {"attention_mask": mask, **types}
    alone = {name: value[1:] for name, value in types.items()}
    for prompts, options, padding in ((ids[1:], {}, [0]), (ids[1:], alone, [0]), (ids, batch, [4, 0])):
        texts = greedily(model.generate, prompts, **options)
        prophets = Prophets(VOCAB, [text[skip:] for text, skip in zip(texts, padding, strict=True)], 0.3)
        custom = {"custom_generate": speculative_generate, "drafter": prophets}
        assert greedily(model.generate, prompts, **custom, **options) == texts
        assert all(each.moved for each in prophets.sessions), "drafts were accepted"


def test_types_that_are_not_of_text_are_refused() -> None:
    model: Any = build_image_text("gemma3", vocab_size=VOCAB)
    ids = torch.arange(1, 9)[None]
    with pytest.raises(DecodingError, match="token_type_ids with drafts is not supported"):
        generate(model, ids, token_type_ids=torch.ones_like(ids), max_new_tokens=2)
    with pytest.raises(
        DecodingError, match="token_type_ids with drafts is not supported"
    ):  # 0 has an embedding
        generate(build("gpt2", vocab_size=VOCAB), ids, token_type_ids=torch.zeros_like(ids), max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by GPT BigCode of transformers 5.17
@pytest.mark.parametrize("family", quick(dict.fromkeys([*on_page(), *MORE])))
def test_the_check_and_the_call_agree(family: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "attention": "eager"} | CHANGES.get(family, {})
    model: Any = build(family, vocab_size=VOCAB, **options)
    found = check_model(loaded(model))
    if family in on_page():
        assert (found.fault == "") == on_page()[family]
    prompt = torch.tensor([[5, 6, 7, 8] * 3])
    if found.fault:
        with pytest.raises(DecodingError, match=re.escape(found.fault)):
            greedily(generate, model, prompt)
    else:
        [text] = greedily(model.generate, prompt)
        assert greedily(generate, model, prompt, drafter=Prophets(VOCAB, [text], 0.3)) == [text]


def test_the_page_lists_the_tested_families() -> None:
    families = on_page()
    assert len(families) > 45
    assert families["llama4_text"]
    assert families["gpt_oss"]
    assert not families["mamba"]
