"""Decoding of one answer for the command line, with streamed text."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from draftstore.cli.output import printable
from draftstore.decoding.budget import Fixed, Planner
from draftstore.decoding.conversation import Pieces
from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.drafter import Drafter
from draftstore.errors import DraftstoreError
from draftstore.hf.requests import GenerationRequest

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
        """Number of tokens after the first, divided by the duration of their passes."""
        return self.tally.tokens * 1e9 / self._pass_ns

    @property
    def _pass_ns(self) -> int:
        return max(self.tally.draft_ns + self.tally.forward_ns + self.tally.accept_ns, 1)

    def figures(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        tally = self.tally
        times = {"draft": tally.draft_ns, "forward": tally.forward_ns, "accept": tally.accept_ns}
        return {
            "tokens": len(self.tokens),
            "passes": tally.passes,
            "accepted_length": round(tally.accepted_length, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "prefill_seconds": round(self.prefill_ns / 1e9, 4),
            "shares": {name: round(taken / self._pass_ns, 4) for name, taken in times.items()},
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
    """Decode one answer; see `draftstore.hf.answering.batch_member` for the arguments."""
    from draftstore.hf.answering import batch_member
    from draftstore.hf.generation import batch_for, decode_all

    given = TimedAnswer()

    def take(step: Step) -> None:
        given.take(step)
        on_step(step)

    member = batch_member(loaded, request, drafter=drafter, planner=planner or Fixed(), min_prob=min_prob)
    with closing(batch_for(loaded.model, [member])) as batch:
        decode_all(batch, [member], take)
    return given


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the index of the first difference between two answers; None if they are equal."""
    pairs = enumerate(zip_longest(left, right))
    return next((index for index, (one, other) in pairs if one != other), None)


@dataclasses.dataclass
class Printer:
    """Streams an answer; on a terminal, accepted draft tokens are highlighted and control characters made visible."""

    console: Console
    pieces: Pieces

    def take(self, step: Step) -> None:
        """Write the tokens of a step."""
        for i, token in enumerate(step.tokens.tolist()):
            self._write(self.pieces.push(token), ACCEPTED if i < len(step.path) else "")

    def finish(self) -> None:
        """Write the text held back and end the line."""
        self._write(self.pieces.finish() + "\n", "")

    def _write(self, piece: str, style: str) -> None:
        if not self.console.is_terminal:
            click.echo(piece, nl=False, color=True)  # leaves escape sequences unchanged
        elif piece:
            shown = "\t".join(map(printable, piece.split("\t")))
            self.console.print(Text(shown, style), end="", soft_wrap=True)


def check_positions(loaded: "LoadedModel", request: GenerationRequest) -> GenerationRequest:
    """Return a request that fits the model, with fewer new tokens if necessary."""
    size, positions = len(request.prompt), loaded.positions
    if size == 0:
        raise DraftstoreError("the prompt is empty, and this model's tokenizer adds no BOS: give some text")
    if positions is None:
        return request
    if size >= positions:
        raise DraftstoreError(
            f"the prompt has {size:,} tokens, but {loaded.name!r} takes at most {positions - 1:,}: shorten it"
        )
    return dataclasses.replace(request, max_tokens=min(request.max_tokens, positions - size))
