"""Forced outputs: every pass of a random model is computed, and a recorded output decides what is accepted.

The output of a random model is noise, and no draft would ever be accepted. So a real model's recorded output determines
the tokens, as in a replay, while every forward pass over every tree is run to completion. The times are those of a
model of this shape that produces this text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.cells import Figures
from benchmarks.decoding.ways import Answers, Way, answer
from benchmarks.gpu.passes import CUDA, DEVICE, POSITIONS, pass_times
from draftstore.decoding.acceptance import Walks
from draftstore.decoding.replay import Recording
from draftstore.hf.members import Member
from draftstore.hf.outputs import BatchOutputs
from draftstore.hf.passes import Rows

SIZES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
TINY, LARGE = (64, 128, 2, 4, 2), (4096, 14336, 32, 32, 8)
"""Sizes of a Llama model: a toy, and Llama 3.1 8B but with the vocabulary of the recordings."""

Picks = dict[tuple[int, int], int]
"""By number of a recording and position in its output: the token that the model itself would have emitted."""


def random_model(sizes: tuple[int, ...], vocab_size: int) -> Any:
    """Return a model with random weights: bfloat16 on a GPU, float32 on a CPU."""
    unused: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    shape: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=POSITIONS, **shape, **unused)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        factory: Any = AutoModelForCausalLM
        return factory.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32).eval()


@contextmanager
def forced(recordings: Sequence[Recording], picks: Picks) -> Iterator[None]:
    """Make all texts in the block accept the recorded tokens, found by their prompts; note the model's own."""
    known = {tuple(each.prompt.tolist()): number for number, each in enumerate(recordings)}
    first, walks, begun = Member.first_token, BatchOutputs.walks, dict[Member, tuple[int, int]]()

    def begin(self: Member, rows: Rows) -> int:
        ids = self.text.ids.tolist()  # the prompt, which may be left-padded
        number = next(known[key] for start in range(len(ids)) if (key := tuple(ids[start:])) in known)
        begun[self] = len(ids), number
        picks[number, 0] = first(self, rows)
        return int(recordings[number].output[0])

    def recorded(self: BatchOutputs) -> Walks:
        walks(self)  # of the model itself, as far as it draws or copies
        best = self._rows.best() if all(member.greedy for member in self._members) else None
        paths, tokens = list[list[int]](), list[list[int]]()
        for text, (member, tree) in enumerate(zip(self._members, self._drafts.trees(), strict=True)):
            prompt, number = begun[member]
            at = len(member.text) - prompt
            coming = recordings[number].output[at:]
            paths.append(tree.accepted(coming[:-1]))
            tokens.append(coming[: len(paths[-1]) + 1].tolist())
            for depth, row in enumerate([0, *(node + 1 for node in paths[-1])]):
                if best is not None:
                    picks[number, at + depth] = int(best[text, row])
        return Walks.of(tokens, paths)

    with patch.object(Member, "first_token", begin), patch.object(BatchOutputs, "walks", recorded):
        yield


def force(
    model: Any, way: Way, recordings: Sequence[Recording], texts: int, *, warm: bool = True, **options: Any
) -> tuple[Figures, Picks]:
    """Decode recorded outputs of one length, and once before with `warm`; return figures and picks."""
    prompts, picks, answers = [each.prompt for each in recordings], Picks(), Answers()
    tokens = len(recordings[0].output)
    with forced(recordings, picks):
        if warm:
            answer(model, prompts, way, tokens, Answers(), together=texts, **options)
        with pass_times() as times:
            answer(model, prompts, way, tokens, answers, together=texts, **options)
    if answers.outputs != [each.output.tolist() for each in recordings]:
        raise AssertionError("the outputs are not those recorded")
    return _figures(answers, times()), picks


def _figures(answers: Answers, times: Sequence[float]) -> Figures:
    """Return the figures of a run; `outside` is the share of its steps in which the GPU waits for the host."""
    found, tally = answers.figures(), answers.tally
    speed = {"tokens_per_second": found["tokens_per_second"]}
    drafts = {key: found[key] for key in ("accepted_length", "nodes", "seconds")}
    if not times:
        return speed | {"captured": False} | drafts
    steps, spent = len(times), (tally.draft_ns, tally.forward_ns, tally.accept_ns)
    draft, queue, accept = (each / 1e6 / steps for each in spent)
    step, gpu = draft + queue + accept, sum(times) / steps
    parts = {"outside": 1 - gpu / step, "step_ms": step, "gpu_ms": gpu}
    parts |= {"draft_ms": draft, "queue_ms": queue, "accept_ms": accept}
    return speed | drafts | {name: round(value, 4) for name, value in parts.items()} | {"steps": steps}
