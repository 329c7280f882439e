"""Requests decoded together, so many at a time: live ones, and forced ones, whose outputs were recorded.

A forced text takes the recorded tokens, after every pass of it was computed and waited for; see `benchmarks.forced`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from benchmarks.decode_runs import Way
from draftstore.decoding.loop import Fixed, Tally
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.hf.batches import Batch
from draftstore.hf.choosing import Chooser, Text
from draftstore.hf.members import Member
from draftstore.hf.passes import Rows
from draftstore.hf.texts import GeneratedText, prepare_text


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        prompt: int32 [any].
        tokens: most tokens of the output.
        output: int32 [tokens], what the model is made to say; None lets it speak.
    """

    prompt: NDArray[np.int32]
    tokens: int
    output: NDArray[np.int32] | None = None


@dataclasses.dataclass
class Together:
    """What decoding all requests took.

    Attributes:
        seconds: from the first prompt to the last token.
        outputs: ids of each request.
        tally: of every text's part of every pass, prefills left out.
        passes: forward passes behind the prefills.
        rows: how many passes there were, by (texts, rows of the largest draft).
    """

    seconds: float = 0.0
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    tally: Tally = dataclasses.field(default_factory=Tally)
    passes: int = 0
    rows: Counter[tuple[int, int]] = dataclasses.field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """Return JSON values; shares are of the time between the prefills and the end."""
        tokens = sum(map(len, self.outputs))
        found: dict[str, Any] = {
            "seconds": round(self.seconds, 4),
            "tokens": tokens,
            "tokens_per_second": round(tokens / self.seconds, 2),
        }
        if self.tally.passes:
            tally = self.tally
            steps = max(tally.draft_ns + tally.forward_ns + tally.accept_ns, 1)
            found |= {
                "accepted_length": round(tally.accepted_length, 3),
                "nodes": round(tally.drafted / tally.passes, 2),
                "passes": self.passes,
                "texts_a_pass": round(tally.passes / self.passes, 2),
                "milliseconds_a_pass": round(steps / 1e6 / self.passes, 4),
            }
            found |= {
                f"{part}_share": round(getattr(tally, f"{part}_ns") / steps, 4)
                for part in ("draft", "forward", "accept")
            }
        return found


class ForcedChooser(Chooser):
    """Waits for the model's token, and takes the recorded one."""

    def __init__(self, text: Text, output: NDArray[np.int32]) -> None:
        """Take the tokens of an output; `text` holds the prompt."""
        super().__init__(text, ())
        self._prompt, self._output = len(text), output.tolist()

    def choose(self, rows: Rows, row: int, emitted: Sequence[int]) -> int:
        """Return the recorded token, once the pass is done."""
        super().choose(rows, row, emitted)
        return int(self._output[len(self._text) - self._prompt + len(emitted)])


def forced_requests(recordings: Sequence[Recording], count: int, tokens: int, longest: int) -> list[Request]:
    """Return requests of the same number of tokens; recordings repeat where there are fewer.

    Args:
        recordings: those with shorter outputs or longer prompts are left out, unless none would be left.
        count: how many requests.
        tokens: of an output.
        longest: most tokens of a prompt.
    """
    fitting = [each for each in recordings if len(each.output) >= tokens and len(each.prompt) <= longest]
    chosen = fitting or recordings
    return [
        Request(each.prompt[-longest:], min(tokens, len(each.output)), each.output[:tokens])
        for each in (chosen[place % len(chosen)] for place in range(count))
    ]


def member_of(model: Any, request: Request, drafter: Drafter | None, way: Way) -> Member:
    """Return a request as a text of a batch."""
    ids = torch.from_numpy(request.prompt.astype(np.int64))[None]
    if request.output is None:
        ids = ids.to(model.device)
        text = prepare_text(
            model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
    else:
        ends = StoppingCriteriaList([MaxLengthCriteria(len(request.prompt) + request.tokens)])
        greedy: Any = GenerationConfig
        text = GeneratedText(ids, (), ends, greedy(do_sample=False))
        text.chooser = ForcedChooser(text.text, request.output)
    planner = (way.planner or Fixed()) if drafter is not None else Fixed(0)
    return Member(text, drafter, planner)


def run_together(
    model: Any,
    batch: Batch,
    way: Way,
    requests: Sequence[Request],
    around: Callable[[Callable[[], Any]], Any] = lambda step: step(),
) -> Together:
    """Decode all requests in one way, as many at a time as the batch takes.

    Args:
        model: of the batch.
        batch: empty before and after.
        way: with drafts or without.
        requests: all join at once.
        around: runs every step.

    Raises:
        Exception: a text failed.
    """
    drafter = way.drafter() if way.drafter else None
    result = Together()
    begin = perf_counter()
    members = [member_of(model, request, drafter, way) for request in requests]
    for member in members:
        batch.join(member)
    begun: set[Member] = set()
    while len(batch):
        widest, texts = 0, 0
        for member, step, error in around(batch.step):
            if step is None:
                raise error or RuntimeError("a text failed")
            if member in begun:
                result.tally.add(step)
                widest, texts = max(widest, len(step.tree) + 1), texts + 1
            begun.add(member)
        if texts:
            result.passes += 1
            result.rows[texts, widest] += 1
    result.seconds = perf_counter() - begin
    result.outputs = [
        member.generated.text.ids[len(request.prompt) :]
        for member, request in zip(members, requests, strict=True)
    ]
    for output, request in zip(result.outputs, requests, strict=True):
        assert request.output is None or output == request.output[: request.tokens].tolist()
    return result


def run_plain(model: Any, requests: Sequence[Request], most: int, cache: str) -> Together:
    """Answer requests by plain `generate`, `most` at a time, padded on the left; each runs to the longest output."""
    result = Together()
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    begin = perf_counter()
    for start in range(0, len(requests), most):
        group = requests[start : start + most]
        width = max(len(request.prompt) for request in group)
        ids = torch.zeros((len(group), width), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(group):
            ids[row, width - len(request.prompt) :] = torch.from_numpy(request.prompt.astype(np.int64))
            mask[row, width - len(request.prompt) :] = 1
        output = model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), do_sample=False, pad_token_id=0,
            max_new_tokens=max(request.tokens for request in group), cache_implementation=cache,
        )  # fmt: skip
        for row, request in zip(output[:, width:].tolist(), group, strict=True):
            kept = row[: request.tokens]
            end = next((place + 1 for place, token in enumerate(kept) if token in ends), len(kept))
            result.outputs.append(kept[:end])
    result.seconds = perf_counter() - begin
    return result
