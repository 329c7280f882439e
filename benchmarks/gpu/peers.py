"""What `generate` of transformers achieves by itself: with either cache, and with its own drafts from the prompt."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList

from benchmarks.decoding.ways import PLAIN, Answers, answer
from benchmarks.gpu.cells import Figures
from draftstore.decoding.replay import Recording
from draftstore.hf.exactness import Forced

WARM_TOKENS = 4


def plain(
    model: Any, recordings: Sequence[Recording], tokens: int, texts: int, *, static: bool = False
) -> Figures:
    """Return tokens per second of a random model's own outputs, which end at `tokens`."""
    prompts = [each.prompt for each in recordings]
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
    passes = tokens * -(-len(prompts) // texts)
    return {
        "tokens_per_second": found.figures()["tokens_per_second"],
        "pass_ms": round(1000 * found.seconds / passes, 3),
        "first_s": round(first.seconds, 1),
    }


def lookup(model: Any, recordings: Sequence[Recording], tokens: int, drafted: int) -> Figures:
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
                output = each.output[:tokens].tolist()
                processor = Forced([*each.prompt.tolist(), *output, *[0] * (drafted + 1)])
                settings: dict[str, Any] = {"logits_processor": LogitsProcessorList([processor]), **options}
                answer(model, [each.prompt], PLAIN, len(output), answers, **settings)
                if answers.outputs[-1] != output:
                    raise AssertionError("an output is not the recorded one")
    finally:
        handle.remove()
    figures = found.figures()
    return {
        "tokens_per_second": figures["tokens_per_second"],
        "tokens_per_pass": round(figures["tokens"] / passes, 3),
        "pass_ms": round(1000 * found.seconds / passes, 3),
    }
