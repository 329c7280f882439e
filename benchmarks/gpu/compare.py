"""Comparisons: with what transformers achieves by itself, and of texts that should be the same.

In float32 and float64, drafts change no text. In half precision, a pass over many rows rounds otherwise than passes
over single rows, as any batch of plain `generate` does: the yardstick is how often plain passes of other shapes agree.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from benchmarks.cells import Figures
from benchmarks.decoding.ways import PLAIN, Answers, Way, answer, differences
from benchmarks.gpu.forced import Picks
from benchmarks.gpu.passes import DEVICE
from draftstore.decoding.budget import Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.exactness import Forced
from draftstore.hf.loading import load_model

WARM_TOKENS = 4
BEGINNINGS = (
    "Once upon a time", "Lily and Tom", "The little dog was", "One day, a big bear", "Mom said", "There was",
    "Tom had a red ball. He", "The cat sat on", "Ben and Mia went to the park. They", "It was a sunny day",
    "A bird wanted to fly, but", "Lucy loved her",
)  # fmt: skip
WRONG = 0.1
"""Share of wrong tokens in the predicted outputs that drafts come from."""


def agreement(one: Picks, other: Picks) -> Figures:
    """Return the share of positions at which two ways would have emitted the same token."""
    both = one.keys() & other.keys()
    same = sum(one[key] == other[key] for key in both)
    return {"positions": len(both), "same": round(same / max(1, len(both)), 5)}


def parallel_picks(model: Any, recordings: Sequence[Recording]) -> Picks:
    """Return what one plain pass over prompt and output would emit at each position."""
    picks: Picks = {}
    for number, each in enumerate(recordings):
        ids = torch.from_numpy(np.concatenate([each.prompt, each.output[:-1]]).astype(np.int64))[None]
        with torch.inference_mode():
            logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0, len(each.prompt) - 1 :]
        picks |= {(number, at): token for at, token in enumerate(logits.float().argmax(-1).tolist())}
    return picks


def trained(data: Path, dtype: torch.dtype, count: int, tokens: int) -> Figures:
    """Compare drafted texts of the small trained model with plain ones; say how close the first differences were."""
    loaded = load_model(data / "models" / "stories260K", dtype=dtype, device=DEVICE)
    model, size = loaded.model, loaded.vocab_size
    prompts = [loaded.text.encode(text, bos=True) for text in BEGINNINGS[:count]]
    expected, batch, found, again = Answers(), Answers(), Answers(), Answers()
    answer(model, prompts, PLAIN, tokens, expected)
    answer(model, prompts, PLAIN, tokens, batch, together=count)
    random, way = np.random.default_rng(0), Way("predicted", planner=Fixed(16))
    for prompt, output in zip(prompts, expected.outputs, strict=True):
        wrong = random.random(len(output)) < WRONG
        predicted = np.where(wrong, random.integers(size, size=len(output)), output)
        for answers in (found, again):
            answer(model, [prompt], way, tokens, answers, RequestDrafter(size, prediction=predicted))
    parted = differences(model, prompts, expected, found)
    return {
        "drafted_is_plain": f"{count - len(parted)} of {count}",
        "drafted_twice_same": found.outputs == again.outputs,
        "plain_in_a_batch_is_plain": sum(map(list.__eq__, expected.outputs, batch.outputs)),
        "largest_margin": max((each["margin"] for each in parted), default=0.0),
        "unexplained": sum(not each["excused"] for each in parted),
        "accepted_length": found.figures()["accepted_length"],
        "differences": parted,
    }


def plain(model: Any, recordings: Sequence[Recording], texts: int, *, static: bool = False) -> Figures:
    """Return tokens per second of a random model's own outputs, as long as the recorded ones."""
    prompts, tokens = [each.prompt for each in recordings], len(recordings[0].output)
    options: dict[str, Any] = {}
    if static:  # of one length for all: another would compile again
        longest = max(map(len, prompts)) + tokens
        options = {"cache_implementation": "static", "max_cache_len": longest}
    first, found = Answers(), Answers()
    try:
        answer(model, prompts[:texts], PLAIN, WARM_TOKENS, first, together=texts, **options)
        answer(model, prompts, PLAIN, tokens, found, together=texts, **options)
    finally:
        if static:
            torch.compiler.reset()  # else the next number of texts would be compiled as a dynamic one
    return _figures(found, tokens * -(-len(prompts) // texts)) | {"first_s": round(first.seconds, 1)}


def lookup(model: Any, recordings: Sequence[Recording], drafted: int) -> Figures:
    """Return tokens per second of recorded outputs, one text at a time, with drafts from the prompt unless 0."""
    options = {"prompt_lookup_num_tokens": drafted} if drafted else {}
    passes, found = 0, Answers()

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    handle = model.register_forward_pre_hook(count)
    try:
        for answers, some in ((Answers(), recordings[:1]), (found, recordings)):
            passes = 0
            for each in some:
                output = each.output.tolist()
                processor = Forced([*each.prompt.tolist(), *output, *[0] * (drafted + 1)])
                settings: dict[str, Any] = {"logits_processor": LogitsProcessorList([processor]), **options}
                answer(model, [each.prompt], PLAIN, len(output), answers, **settings)
                if answers.outputs[-1] != output:
                    raise AssertionError("an output is not the recorded one")
    finally:
        handle.remove()
    return _figures(found, passes)


def _figures(found: Answers, passes: int) -> Figures:
    figures = found.figures()
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "tokens_per_pass": round(figures["tokens"] / passes, 3),
        "pass_ms": round(1000 * found.seconds / passes, 3),
    }
