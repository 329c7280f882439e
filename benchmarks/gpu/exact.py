"""Whether outputs are the same: of a random model along forced texts, and of a small trained one by itself.

In float32 and float64 they are. In half precision, a pass over many rows rounds otherwise than passes over single rows,
as any batch of plain `generate` does. So the yardstick is there how often plain passes of other shapes agree.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.decoding.ways import PLAIN, Answers, Way, answer, differences
from benchmarks.gpu.cells import Figures
from benchmarks.gpu.forced import Picks
from benchmarks.gpu.passes import DEVICE
from draftstore.decoding.planners import Fixed
from draftstore.decoding.replay import Recording
from draftstore.drafting.request import RequestDrafter
from draftstore.hf.loading import LoadedModel, load_model

BEGINNINGS = (
    "Once upon a time",
    "Lily and Tom",
    "The little dog was",
    "One day, a big bear",
    "Mom said",
    "There was",
)
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
    model, prompts = loaded.model, _prompts(loaded, count)
    expected, batch = Answers(), Answers()
    answer(model, prompts, PLAIN, tokens, expected)
    answer(model, prompts, PLAIN, tokens, batch, together=count)
    found, again = (_drafted(loaded, prompts, expected.outputs, tokens) for _ in range(2))
    parted = differences(model, prompts, expected, found)
    return {
        "count": count,
        "tokens": tokens,
        "drafted_is_plain": sum(map(list.__eq__, expected.outputs, found.outputs)),
        "plain_in_a_batch_is_plain": sum(map(list.__eq__, expected.outputs, batch.outputs)),
        "drafted_twice_same": found.outputs == again.outputs,
        "accepted_length": found.figures().get("accepted_length"),
        "largest_margin": max((each["margin"] for each in parted), default=0.0),
        "unexplained": sum(not each["excused"] for each in parted),
        "differences": parted,
    }


def _prompts(loaded: LoadedModel, count: int) -> list[NDArray[np.int32]]:
    """Return beginnings of stories, int32 [any] each, of different lengths."""
    model: Any = loaded.model
    torch.manual_seed(0)
    prompts = []
    for number in range(count):
        ids = torch.from_numpy(loaded.text.encode(BEGINNINGS[number % len(BEGINNINGS)], bos=True))[
            None
        ].long()
        options = {"max_new_tokens": 4 + number, "do_sample": True, "pad_token_id": 0}
        grown = model.generate(ids.to(DEVICE), **options)
        prompts.append(grown[0].cpu().numpy().astype(np.int32))
    return prompts


def _drafted(
    loaded: LoadedModel, prompts: Sequence[NDArray[np.int32]], outputs: Sequence[list[int]], tokens: int
) -> Answers:
    """Decode with drafts from outputs in which some tokens are wrong."""
    answers, random = Answers(), np.random.default_rng(0)
    for prompt, output in zip(prompts, outputs, strict=True):
        wrong = random.random(len(output)) < WRONG
        predicted = np.where(wrong, random.integers(loaded.vocab_size, size=len(output)), output)
        drafter = RequestDrafter(loaded.vocab_size, prediction=predicted)
        answer(loaded.model, [prompt], Way("predicted", planner=Fixed(16)), tokens, answers, drafter)
    return answers
