"""Decoding one answer for the command line, with text as it grows."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from draftstore.decoding.loop import Planner, Step, Tally
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DraftstoreError
from draftstore.hf.requests import GenerationRequest
from draftstore.text.incremental import Pieces

if TYPE_CHECKING:
    from draftstore.hf.loading import LoadedModel

ACCEPTED = "green"


@dataclasses.dataclass
class TimedAnswer:
    """An answer and its timings."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    tally: Tally = dataclasses.field(default_factory=Tally)
    prefill_ns: int = 0

    def take(self, step: Step) -> None:
        """Add a step; the first is the prefill."""
        if self.tokens:
            self.tally.add(step)
        else:
            self.prefill_ns = step.draft_ns + step.forward_ns + step.accept_ns
        self.tokens += step.tokens.tolist()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, divided by the time of their passes."""
        tally = self.tally
        total = tally.draft_ns + tally.forward_ns + tally.accept_ns
        return tally.tokens * 1e9 / total if total else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        tally = self.tally
        total = max(tally.draft_ns + tally.forward_ns + tally.accept_ns, 1)
        return {
            "tokens": len(self.tokens),
            "passes": tally.passes,
            "accepted_length": round(tally.accepted_length, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "prefill_seconds": round(self.prefill_ns / 1e9, 4),
            "shares": {
                "draft": round(tally.draft_ns / total, 4),
                "forward": round(tally.forward_ns / total, 4),
                "accept": round(tally.accept_ns / total, 4),
            },
        }


def answer(
    loaded: "LoadedModel",
    request: GenerationRequest,
    *,
    drafter: Drafter | None,
    planner: Planner | None = None,
    min_prob: float = 0.0,
    on_step: Callable[[Step], None] = lambda _: None,
) -> TimedAnswer:
    """Decode one answer; see `draftstore.hf.answering.decode_request` for the arguments."""
    from draftstore.hf.answering import decode_request

    given = TimedAnswer()

    def take(step: Step) -> None:
        given.take(step)
        on_step(step)

    decode_request(loaded, request, drafter=drafter, planner=planner, min_prob=min_prob, on_step=take)
    return given


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first difference of two answers; None if they are equal."""
    if list(left) == list(right):
        return None
    same = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(same) if a != b), min(len(left), len(right)))


class Printer:
    """Writes an answer as it grows; on a terminal, accepted draft tokens stand out."""

    def __init__(self, console: Console, pieces: Pieces) -> None:
        """Write to a console."""
        self._console = console
        self._pieces = pieces

    def take(self, step: Step) -> None:
        """Write the tokens of a step."""
        for i, token in enumerate(step.tokens.tolist()):
            self._write(self._pieces.push(token), ACCEPTED if i < len(step.path) else "")

    def finish(self) -> None:
        """Write the text held back, and end the line."""
        self._write(self._pieces.finish() + "\n", "")

    def _write(self, piece: str, style: str) -> None:
        if not piece:
            return
        if self._console.is_terminal:
            self._console.print(Text(piece, style=style), end="", soft_wrap=True)
        else:
            click.echo(piece, nl=False)


def check_positions(loaded: "LoadedModel", request: GenerationRequest) -> GenerationRequest:
    """Return a request that fits the model, with fewer new tokens if necessary."""
    size = len(request.prompt)
    if size == 0:
        raise DraftstoreError(
            "the prompt is empty, and this model's tokenizer adds no token in front: give some text"
        )
    positions = loaded.positions
    if positions is None or size + request.max_tokens <= positions:
        return request
    if size >= positions:
        raise DraftstoreError(
            f"the prompt has {size:,} tokens, {loaded.name!r} takes at most {positions - 1:,}: shorten it"
        )
    return dataclasses.replace(request, max_tokens=positions - size)
