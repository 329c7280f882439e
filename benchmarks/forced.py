"""Forced outputs: every pass of a random model is computed, and a recorded output decides what is accepted.

What a random model says is noise, and no draft would ever be accepted. So a real model's recorded output says which
tokens come, as in a replay, while every forward pass over every tree is run, waited for, and its rows kept. The times
are those of a model of this shape that would have written this text; its words are not computed. Token Recycling is
left out: it lives on candidates, and those of random weights are noise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

from benchmarks.decode_runs import Outcome, Series, Way, take_turns
from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.loop import Fixed, Target, Verdict, decode
from draftstore.decoding.replay import RecordedTarget, Recording
from draftstore.drafting.drafter import Drafter, projection_of
from draftstore.drafting.faults import NoDrafts
from draftstore.hf.caches import rollback_cache
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.generation import default_forward
from draftstore.hf.targets import ModelTarget, Prefilled, vocab_size
from draftstore.trees.tree import DraftTree

MAX_NODES = 128
LABEL = "random weights, forced outputs"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama model.

    Attributes:
        hidden: width.
        inner: width of the feed-forward layers.
        layers: how many.
        heads: of attention.
        key_value_heads: of keys and values.
    """

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
"""Llama 3.2 1B and Llama 3.1 8B, but for the vocabulary, which is that of the recordings."""


def random_model(shape: Shape, vocab_size: int, *, device: str | None = None, positions: int = 8192) -> Any:
    """Return a model of a shape with random weights: bfloat16 on a GPU, float32 on a CPU."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    with torch.device(where):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        model = factory.from_config(config, dtype=dtype)
    return model.eval()


class ForcedTarget:
    """A `Target` that computes everything, and then says what was recorded."""

    def __init__(self, model: Target, recorded: RecordedTarget) -> None:
        """Run `model`, and say what `recorded` says."""
        self._model = model
        self._recorded = recorded

    def verify(self, tree: DraftTree) -> "ForcedVerdict":
        """Run the forward pass."""
        return ForcedVerdict(self._model.verify(tree), self._recorded)

    def keep(self, accepted: Acceptance) -> None:
        """Keep the accepted rows, and go on in the recording."""
        self._model.keep(accepted)
        self._recorded.keep(accepted)


class ForcedVerdict:
    """A `Verdict` that waits for the model's token, and says the recorded one."""

    def __init__(self, model: Verdict, recorded: RecordedTarget) -> None:
        """Wait for `model`, and say what `recorded` says."""
        self._model = model
        self._recorded = recorded

    def choose(self, row: int, emitted: Sequence[int]) -> int:
        """Return the recorded token, once the pass is done."""
        self._model.choose(row, emitted)
        return self._recorded.choose(row, emitted)

    def candidates(self) -> NDArray[np.int32] | None:
        """Return the model's."""
        return self._model.candidates()

    def hidden(self, row: int) -> NDArray[np.float32] | None:
        """Return the model's."""
        return self._model.hidden(row)


def run_forced(
    model: Any,
    ways: Sequence[Way],
    recordings: Sequence[Recording],
    *,
    rounds: int,
    on_answer: Callable[[str], None] = lambda _: None,
) -> list[Series]:
    """Have a model write every recorded output in every way, in turns."""
    for way in ways:  # compiles, takes memory, captures graphs
        write_one(model, way, way.drafter() if way.drafter else None, recordings[0])
    return take_turns(ways, recordings, partial(write_one, model), rounds=rounds, on_answer=on_answer)


def write_one(model: Any, way: Way, drafter: Drafter | None, recording: Recording) -> Outcome:
    """Write one recorded output; plain generate writes as many tokens of its own.

    Raises:
        AssertionError: what was written is not what was recorded.
    """
    begin = perf_counter()
    if way.plain:
        return Outcome(_plain(model, recording), perf_counter() - begin)
    target = _prefilled(model, recording)
    outcome = Outcome(recording.output[:1].tolist(), 0.0, perf_counter() - begin)
    recorded = RecordedTarget(recording.output)
    start = np.concatenate([recording.prompt, recording.output[:1]])
    session = NoDrafts() if drafter is None else drafter.session(start)
    target.ask(
        candidates=session.needs_candidates, hidden=session.needs_hidden, projection=projection_of(session)
    )
    planner = way.planner or Fixed()
    for step in decode(ForcedTarget(target, recorded), session, planner=planner, ends=recorded.ends):
        outcome.take(step)
        outcome.tokens += step.tokens.tolist()
    target.close()
    outcome.seconds = perf_counter() - begin
    assert outcome.tokens == recording.output.tolist(), "what was written is not what was recorded"
    return outcome


def _plain(model: Any, recording: Recording) -> list[int]:
    """Have `model.generate` write as many tokens of its own as were recorded."""
    ids = torch.from_numpy(recording.prompt.astype(np.int64))[None].to(model.device)
    count = len(recording.output)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


@torch.no_grad()
def _prefilled(model: Any, recording: Recording) -> ModelTarget:
    """Run the prompt through the model; the first recorded token is the last of the text, as after a prefill."""
    prompt = torch.from_numpy(recording.prompt.astype(np.int64))[None]
    size = prompt.shape[1]
    config = model.config
    static = model.device.type == "cuda"  # allows CUDA graphs
    room = size + len(recording.output) + MAX_NODES + 1
    past: Any = StaticCache(config=config, max_cache_len=room) if static else DynamicCache(config=config)
    positions = torch.arange(size, device=model.device)[None]
    outputs = model(
        input_ids=prompt.to(model.device),
        past_key_values=past,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    outputs.logits.argmax(dim=-1).cpu()
    text = Text(torch.cat([prompt, torch.tensor([[int(recording.output[0])]])], dim=1))
    kwargs = {
        "past_key_values": past,
        "attention_mask": None,
        "position_ids": positions + 1,
        "use_cache": True,
    }
    forward = default_forward(Prefilled(model, rollback_cache(past), kwargs, text))
    return ModelTarget(forward, Chooser(text, ()), text, vocab_size(model))
