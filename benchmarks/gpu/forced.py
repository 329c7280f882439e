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

from benchmarks.decoding.ways import Answers, Way, answer
from benchmarks.gpu.cells import Figures
from benchmarks.gpu.passes import CUDA, DEVICE, POSITIONS, pass_times
from draftstore.decoding.replay import Recording
from draftstore.hf.choosing import Chooser
from draftstore.hf.members import ModelVerdict

Picks = dict[tuple[int, int], int]
"""By number of a recording and position in its output: the token that the model itself would have emitted."""


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


def random_model(shape: Shape, vocab_size: int) -> Any:
    """Return a model of a shape with random weights: bfloat16 on a GPU, float32 on a CPU."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device(DEVICE):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        return factory.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32).eval()


@contextmanager
def forced(recordings: Sequence[Recording], picks: Picks) -> Iterator[None]:
    """Make all texts in the block accept the recorded tokens, found by their prompts; note the model's own in `picks`."""
    known = {tuple(each.prompt.tolist()): number for number, each in enumerate(recordings)}
    choose, begun = ModelVerdict.choose, dict[int, tuple[Chooser, int, int]]()

    def recorded(self: ModelVerdict, row: int, emitted: Sequence[int]) -> int:
        picked, chooser = choose(self, row, emitted), self._chooser
        text = chooser._text
        if id(chooser) not in begun:
            begun[id(chooser)] = chooser, len(text), _number(known, text.ids.tolist())
        _, prompt, number = begun[id(chooser)]
        at = len(text) - prompt + len(emitted)
        picks[number, at] = picked
        return int(recordings[number].output[at])

    with patch.object(ModelVerdict, "choose", recorded):
        yield


def _number(known: dict[tuple[int, ...], int], text: list[int]) -> int:
    """Return the number of the recording of a prompt, which may be left-padded."""
    return next(known[key] for start in range(len(text)) if (key := tuple(text[start:])) in known)


def force(
    model: Any, way: Way, recordings: Sequence[Recording], tokens: int, texts: int, *, warm: bool = True, **options: Any
) -> tuple[Figures, Picks]:  # fmt: skip
    """Decode recorded outputs, with `warm` once before to capture all graphs; return figures and picks."""
    prompts, picks = [each.prompt for each in recordings], Picks()
    answers = Answers()
    with forced(recordings, picks):
        if warm:
            answer(model, prompts, way, tokens, Answers(), together=texts, **options)
        with pass_times() as times:
            answer(model, prompts, way, tokens, answers, together=texts, **options)
    if answers.outputs != [each.output[:tokens].tolist() for each in recordings]:
        raise AssertionError("the outputs are not those recorded")
    return _figures(answers, times()), picks


def _figures(answers: Answers, times: Sequence[float]) -> Figures:
    """Return the figures of a run; `outside` is the share of its steps in which the GPU waits for the host."""
    found, tally = answers.figures(), answers.tally
    figures = {key: found[key] for key in ("tokens_per_second", "accepted_length", "nodes", "seconds")}
    if not times:
        return figures | {"captured": False}
    steps, loop = len(times), (tally.draft_ns + tally.forward_ns + tally.accept_ns) / 1e6
    return figures | {
        "outside": round(1 - sum(times) / loop, 4),
        "step_ms": round(loop / steps, 3),
        "gpu_ms": round(sum(times) / steps, 3),
        "draft_ms": round(tally.draft_ns / 1e6 / steps, 4),
        "queue_ms": round(tally.forward_ns / 1e6 / steps, 4),
        "accept_ms": round(tally.accept_ns / 1e6 / steps, 4),
        "steps": steps,
    }
