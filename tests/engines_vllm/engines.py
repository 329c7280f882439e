"""Real engines in this process, with or without drafts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines_vllm.counting import NAME

VOCAB, CHAIN, ROWS = 256, 8, 8


def make_model(folder: Path, spread: float = 0.02) -> Path:
    """Write a random Llama and a tokenizer of words `w0` to `w255`, whose texts and ids are the same.

    With a spread of 0.02, that of its weights, all tokens are about as likely; with 1.0 few are.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    about = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=spread,
    )  # fmt: skip
    LlamaForCausalLM(about).save_pretrained(folder)
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@contextmanager
def running(model: Path, *, drafts: bool, **settings: Any) -> Iterator[Any]:
    """Start an engine in float32, whose drafter is `Counting.last`, and end it."""
    from vllm import LLM

    speculative = {"method": "custom_class", "model": NAME, "num_speculative_tokens": CHAIN}
    with pytest.MonkeyPatch.context() as patch:
        # vLLM 0.32.0 looks for kernels in the attributes of every module when it starts on a CPU, and fails at one of
        # numba's, which a process with its first engine loads later.
        patch.delitem(sys.modules, "llvmlite.binding.ffi", raising=False)
        engine: Any = LLM(
            str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0, disable_log_stats=False,
            max_num_seqs=ROWS, **{"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20} | settings,
            **({"speculative_config": speculative} if drafts else {}),
        )  # fmt: skip
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()  # now: later it would close what the next engine uses
