"""Forced outputs: every pass of a random model is computed, and a recorded output decides what is accepted.

The output of a random model is noise, and no draft would ever be accepted. So a real model's recorded output determines
the tokens, as in a replay, while every forward pass over every tree is run to completion. The times are those of a
model of this shape that produces this text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftstore.decoding.replay import Recording
from draftstore.hf.choosing import Chooser
from draftstore.hf.members import ModelVerdict


class Shape(NamedTuple):
    """Sizes of a Llama model: hidden size, intermediate size, layers, attention heads, key-value heads."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2),
    "1b": Shape(2048, 8192, 16, 32, 8),
    "8b": Shape(4096, 14336, 32, 32, 8),
}
"""Llama 3.2 1B and Llama 3.1 8B, but with the vocabulary of the recordings."""


def random_model(shape: Shape, vocab_size: int, positions: int) -> Any:
    """Return a model of a shape with random weights: bfloat16 on a GPU, float32 on a CPU."""
    cuda = torch.cuda.is_available()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("cuda" if cuda else "cpu"):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        return factory.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32).eval()


@contextmanager
def forced(recordings: Sequence[Recording]) -> Iterator[None]:
    """Make all texts in the block accept the recorded tokens, found by their prompts, after each pass."""
    outputs = {tuple(each.prompt.tolist()): each.output.tolist() for each in recordings}
    choose, begun = ModelVerdict.choose, dict[int, tuple[Chooser, int, list[int]]]()

    def recorded(self: ModelVerdict, row: int, emitted: Sequence[int]) -> int:
        choose(self, row, emitted)
        chooser = self._chooser
        text = chooser._text.ids.tolist()
        if id(chooser) not in begun:
            begun[id(chooser)] = chooser, len(text), _output(outputs, text)
        _, prompt, output = begun[id(chooser)]
        return output[len(text) - prompt + len(emitted)]

    with patch.object(ModelVerdict, "choose", recorded):
        yield


def _output(outputs: dict[tuple[int, ...], list[int]], text: list[int]) -> list[int]:
    """Return the output for a prompt, which may be left-padded."""
    return next(outputs[key] for start in range(len(text)) if (key := tuple(text[start:])) in outputs)
