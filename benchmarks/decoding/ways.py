"""Modes of decoding: their times, the yield of their passes, and whether outputs equal those of plain `generate`."""

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.decoding.budget import Planner
from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.drafter import Drafter
from draftstore.hf import generate

Prompts = Sequence[NDArray[np.int32]]
EXCUSED = {torch.float64: 0.0, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
"""A difference is attributed to rounding if the two largest logits are no further apart, by type of the model."""


class Way(NamedTuple):
    """A mode of decoding.

    Attributes:
        name: name in tables.
        drafter: makes a drafter without memory of earlier texts; None: no drafts.
        planner: chooses how much of a draft is verified.
        plain: whether it is `model.generate` itself.
    """

    name: str
    drafter: Callable[[], Drafter] | None = None
    planner: Planner | None = None
    plain: bool = False


PLAIN, LOOP = Way("plain generate", plain=True), Way("our loop, no drafts")


@dataclasses.dataclass
class Answers:
    """Outputs for some prompts.

    Attributes:
        outputs: ids of each output.
        seconds: total time of all calls, including prefill.
        tally: totals of the passes after the prefills, over all texts.
    """

    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tally: Tally = dataclasses.field(default_factory=Tally)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        tokens, tally = sum(map(len, self.outputs)), self.tally
        found: dict[str, Any] = {
            "seconds": round(self.seconds, 3),
            "tokens": tokens,
            "tokens_per_second": round(tokens / self.seconds, 2),
        }
        if tally.passes:
            found |= {
                "accepted_length": round(tally.accepted_length, 3),
                "nodes": round(tally.drafted / tally.passes, 2),
                "draft_share": round(tally.draft_ns / 1e9 / self.seconds, 4),
            }
        return found


def answer(
    model: Any, prompts: Prompts, way: Way, tokens: int, answers: Answers,
    drafter: Drafter | None = None, together: int = 1, **settings: Any,
) -> None:  # fmt: skip
    """Answer prompts, int32 [any] each, in left-padded batches, and add the outputs to `answers`.

    Decoding is greedy unless `settings` of `generate` say otherwise.
    """
    if drafter is None and way.drafter is not None:
        drafter = way.drafter()
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **settings}
    for start in range(0, len(prompts), together):
        ids, mask = _padded(prompts[start : start + together])
        ids, mask = ids.to(model.device), mask.to(model.device)
        begun: set[int] = set()

        def on_step(step: Step, begun: set[int] = begun) -> None:
            if step.text in begun:
                answers.tally.add(step)
            begun.add(step.text)

        begin = perf_counter()
        if way.plain:
            output = model.generate(ids, attention_mask=mask, **options)
        else:
            output = generate(
                model, ids, attention_mask=mask, drafter=drafter, planner=way.planner, on_step=on_step, **options
            )  # fmt: skip
        rows = output[:, ids.shape[1] :].tolist()
        answers.seconds += perf_counter() - begin
        answers.outputs += [_until_end(model, row) for row in rows]


def _padded(prompts: Prompts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return padded prompts and their mask, int64 [texts, longest] each."""
    width = max(map(len, prompts))
    rows = [[*[-1] * (width - len(prompt)), *prompt.tolist()] for prompt in prompts]
    ids = torch.tensor(rows)
    return ids.clamp(min=0), (ids >= 0).long()


def _until_end(model: Any, row: list[int]) -> list[int]:
    """Return a row up to the first EOS id."""
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    place = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
    return row[:place]


def differences(model: Any, prompts: Prompts, expected: Answers, found: Answers) -> list[dict[str, Any]]:
    """Return where outputs first differ from those of plain `generate`, and whether rounding explains it."""
    parted, allowed = [], EXCUSED[model.dtype]
    triples = zip(prompts, expected.outputs, found.outputs, strict=True)
    for number, (prompt, right, other) in enumerate(triples):
        if right != other:
            pairs = enumerate(zip(right, other, strict=False))
            place = next((at for at, (one, two) in pairs if one != two), min(len(right), len(other)))
            text = torch.tensor([[*prompt.tolist(), *right[:place]]], device=model.device)
            with torch.inference_mode():
                first, second = model(text, logits_to_keep=1).logits[0, -1].double().topk(2).values.tolist()
            margin = first - second
            parted.append({"prompt": number, "place": place, "margin": margin, "excused": margin <= allowed})
    return parted
