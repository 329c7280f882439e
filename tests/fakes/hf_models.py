"""Models that tests decode with: a small trained one, and tiny random ones of several architectures.

    model = stories(data, torch.float64)        # trained, 260 K parameters, 512 ids; `data` is the fixture
    model = tiny("qwen3", vocab_size=40)        # random weights, no files needed

All are in evaluation mode, on the CPU, and shared between tests: change `generation_config` only in copies.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from draftstore.hf import runner, sampling
from draftstore.text.tokenizer import TextTokenizer

cast(Any, logging).disable_progress_bar()

Test = TypeVar("Test", bound=Callable[..., Any])

STORIES = (
    "Once upon a time",
    "Lily and Tom",
    "The little dog was",
    "One day, a big bear",
    "Mom said",
    "There was",
)
"""Beginnings that the trained model continues sensibly."""


def stories(data: Path, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> PreTrainedModel:
    """Return the trained model stories260K."""
    return _stories(data / "models" / "stories260K", dtype, attention)


@functools.cache
def _stories(folder: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return cast(PreTrainedModel, model.eval())


@functools.cache
def stories_tokenizer(data: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of stories260K, as transformers knows it."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
        data / "models" / "stories260K", clean_up_tokenization_spaces=False
    )
    return tokenizer


def story_ids(data: Path, text: str = STORIES[0]) -> torch.Tensor:
    """Return int64 [1, length], the ids of a text with BOS in front."""
    tokenizer = stories_tokenizer(data)
    ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False)
    return torch.tensor([[1, *ids]])


def build(
    architecture: str = "llama",
    *,
    vocab_size: int = 64,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    seed: int = 0,
    spread: float = 0.4,
    **changes: Any,
) -> PreTrainedModel:
    """Return a model of two layers with random weights.

    Args:
        architecture: `llama`, `qwen2`, `qwen3`, `mistral`, ... a model type of transformers.
        vocab_size: ids; there is no EOS among them unless `changes` names one.
        dtype: of the weights.
        attention: implementation.
        seed: of the weights.
        spread: standard deviation of the weights. At 0.4 greedy outputs wander, near 0 they repeat one token.
        changes: of the configuration, like `sliding_window=8`.
    """
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": spread,
    }
    if architecture == "mistral":
        shape["sliding_window"] = None
    config = AutoConfig.for_model(architecture, vocab_size=vocab_size, **(shape | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config, dtype=dtype, attn_implementation=attention)
    return cast(PreTrainedModel, model.eval())


def save_tiny(folder: Path, tokenizer: TextTokenizer) -> None:
    """Write a model with random weights, long texts and a tokenizer into a folder, which need not exist."""
    model: Any = build(vocab_size=tokenizer.vocab_size, max_position_embeddings=8192, spread=1.0)
    model.generation_config.eos_token_id = tokenizer.eos_id
    model.save_pretrained(folder)
    tokenizer.save(folder)


def build_image_text(family: str, *, vocab_size: int = 64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a model of text and images with random weights, small in both; `changes` are of its text configuration."""
    base: Any = AutoConfig.for_model(family)
    text: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": vocab_size,
        "max_position_embeddings": 512, "initializer_range": 0.4, "layer_types": None, "num_local_experts": 4,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "depth": 1, "embed_dim": 32,
        "num_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "image_size": 28,
        "patch_size": 14, "out_hidden_size": 32,
    }  # fmt: skip

    def of(config: Any, values: dict[str, Any]) -> dict[str, Any]:
        known = config.to_dict()
        return {"model_type": config.model_type, **{key: values[key] for key in values.keys() & known.keys()}}

    ids = {key: vocab_size - 1 for key in ("image_token_id", "image_token_index") if hasattr(base, key)}
    config = AutoConfig.for_model(
        family,
        text_config=of(base.text_config, text) | changes,
        vision_config=of(base.vision_config, vision) if base.vision_config else None,
        **ids,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        factory: Any = AutoModelForImageTextToText
        model = factory.from_config(config, dtype=torch.float32)
    return cast(PreTrainedModel, model.eval())


tiny = functools.cache(build)
"""The same, made once for the same arguments."""


def needs_gpu(test: Test) -> Test:
    """Mark a test that waits for a GPU: `python -m benchmarks.gpu` runs it."""
    here = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
    return cast(Test, pytest.mark.gpu(here(test)))


@contextmanager
def on_a_gpu(model: Any) -> Iterator[Any]:
    """Bring a model to the GPU; it stays the same object."""
    try:
        yield torch.nn.Module.to(model, "cuda")
    finally:
        runner._IDLE.pop(model, None)
        torch.nn.Module.to(model, "cpu")


@contextmanager
def shapes_of_graphs() -> Iterator[None]:
    """Run passes in the shapes of CUDA graphs and draw as on a GPU; there is none, so passes are not captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "takes_graphs", lambda _model: True)
        patch.setattr(sampling, "has_queue", lambda _device: True)
        runner._IDLE.clear()
        yield
        runner._IDLE.clear()
