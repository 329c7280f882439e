"""Ways of decoding, run in turns: what each takes, what its passes yield, whether its outputs are those of the first.

In every round all ways answer every prompt, one after the other, in an order that moves on from prompt to prompt: a
machine that slows down does so for all of them. Seconds are those of a whole call, prefill included.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.lossless import Difference, compare
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Planner, Step, Tally
from draftstore.drafting.drafter import Drafter

P = TypeVar("P")
PLAIN = "plain generate"
LOOP = "our loop, no drafts"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of decoding.

    Attributes:
        name: for tables.
        drafter: makes the drafter of a round, which starts without memory of earlier rounds; None is without drafts.
        planner: chooses how much is verified.
        plain: whether it is `model.generate` itself.
    """

    name: str
    drafter: Callable[[], Drafter] | None = None
    planner: Planner | None = None
    plain: bool = False


@dataclasses.dataclass
class Outcome:
    """One answer.

    Attributes:
        tokens: ids of the answer.
        seconds: of the whole call.
        prefill_seconds: until the first token; 0 where it is not known.
        tally: of the passes after the prefill.
        rows: how many of them there were, by their rows.
    """

    tokens: list[int]
    seconds: float
    prefill_seconds: float = 0.0
    tally: Tally = dataclasses.field(default_factory=Tally)
    rows: Counter[int] = dataclasses.field(default_factory=Counter)

    def take(self, step: Step) -> None:
        """Count a pass."""
        self.tally.add(step)
        self.rows[len(step.tree) + 1] += 1


@dataclasses.dataclass
class Series:
    """All answers of one way: by round, then by prompt."""

    way: Way
    rounds: list[list[Outcome]] = dataclasses.field(default_factory=list)
    differences: list[tuple[int, Difference]] = dataclasses.field(default_factory=list)

    def seconds(self, turn: int) -> float:
        """Return the seconds of a round."""
        return sum(outcome.seconds for outcome in self.rounds[turn])

    def medians(self) -> list[float]:
        """Return the median seconds of each prompt."""
        return [
            median(outcome.seconds for outcome in outcomes) for outcomes in zip(*self.rounds, strict=True)
        ]

    def tally(self) -> Tally:
        """Return the totals of all rounds."""
        total = Tally()
        for outcome in (outcome for outcomes in self.rounds for outcome in outcomes):
            for field in dataclasses.fields(Tally):
                value = getattr(total, field.name) + getattr(outcome.tally, field.name)
                setattr(total, field.name, value)
        return total

    def rows(self) -> Counter[int]:
        """Return how many passes there were in all rounds, by their rows."""
        return sum((outcome.rows for outcomes in self.rounds for outcome in outcomes), Counter())


def take_turns(
    ways: Sequence[Way],
    prompts: Sequence[P],
    answer: Callable[[Way, Drafter | None, P], Outcome],
    *,
    rounds: int,
    on_answer: Callable[[str], None] = lambda _: None,
    check: Callable[[Sequence["Series"], int], None] = lambda _series, _place: None,
) -> list[Series]:
    """Have every way answer every prompt in every round.

    Args:
        ways: that take turns.
        prompts: of any kind.
        answer: answers one of them in one way, with the drafter of this round.
        rounds: how often.
        on_answer: called after every answer with the name of its way.
        check: called in the first round after every prompt, with its place: all ways have answered it.
    """
    series = [Series(way) for way in ways]
    for turn in range(rounds):
        drafters = [way.drafter() if way.drafter else None for way in ways]
        for each in series:
            each.rounds.append([])
        for place, prompt in enumerate(prompts):
            first = (place + turn) % len(ways)
            for number in [*range(first, len(ways)), *range(first)]:
                outcome = answer(ways[number], drafters[number], prompt)
                series[number].rounds[turn].append(outcome)
                on_answer(ways[number].name)
            if turn == 0:
                check(series, place)
    return series


def run_ways(
    model: Any,
    ways: Sequence[Way],
    prompts: Sequence[NDArray[np.int32]],
    *,
    tokens: int,
    rounds: int,
    on_answer: Callable[[str], None] = lambda _: None,
) -> list[Series]:
    """Have a model answer every prompt in every way, and compare all answers with those of the first.

    Args:
        model: of transformers.
        ways: that take turns.
        prompts: int32 [any] each.
        tokens: most tokens of an answer.
        rounds: how often.
        on_answer: called after every answer with the name of its way.
    """

    def check(series: Sequence[Series], place: int) -> None:
        expected = series[0].rounds[0][place].tokens
        for each in series[1:]:
            difference = compare(model, prompts[place], expected, each.rounds[0][place].tokens)
            if difference is not None:
                each.differences.append((place, difference))

    for way in ways:
        run_one(model, way, way.drafter() if way.drafter else None, prompts[0], 4)  # compiles, takes memory
    answer = partial(run_one, model, tokens=tokens)
    return take_turns(ways, prompts, answer, rounds=rounds, on_answer=on_answer, check=check)


def run_one(model: Any, way: Way, drafter: Drafter | None, prompt: NDArray[np.int32], tokens: int) -> Outcome:
    """Answer one prompt."""
    import torch

    from draftstore.hf import generate

    ids = torch.from_numpy(prompt.astype(np.int64))[None].to(model.device)
    outcome = Outcome([], 0.0)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    begin = perf_counter()

    def on_step(step: Step) -> None:
        if outcome.prefill_seconds:
            outcome.take(step)
        else:
            outcome.prefill_seconds = perf_counter() - begin

    if way.plain:
        output = model.generate(ids, **options)
    else:
        output = generate(model, ids, drafter=drafter, planner=way.planner, on_step=on_step, **options)
    outcome.seconds = perf_counter() - begin
    outcome.tokens = output[0, ids.shape[1] :].tolist()
    return outcome


def figures_of(series: Sequence[Series], curve: CostCurve | None = None) -> list[dict[str, Any]]:
    """Return the figures of all ways as JSON values; speedups are over the ways `PLAIN` and `LOOP`.

    With a curve there is also the speedup that it foretells from the rows of all passes, which no noise disturbs.
    """
    by_name = {each.way.name: each for each in series}
    return [_figures(each, by_name.get(PLAIN), by_name.get(LOOP), curve) for each in series]


def _figures(
    series: Series, plain: Series | None, loop: Series | None, curve: CostCurve | None
) -> dict[str, Any]:
    rounds = range(len(series.rounds))
    answered = sum(len(outcome.tokens) for outcome in series.rounds[0])
    tally = series.tally()
    steps = max(tally.draft_ns + tally.forward_ns + tally.accept_ns, 1)
    prefill = median(sum(outcome.prefill_seconds for outcome in series.rounds[turn]) for turn in rounds)
    figures: dict[str, Any] = {
        "way": series.way.name,
        "seconds": round(median(series.seconds(turn) for turn in rounds), 3),
        "tokens": answered,
        "tokens_per_second": round(median(answered / series.seconds(turn) for turn in rounds), 2),
        "differences": [
            {"prompt": place, **dataclasses.asdict(difference), "excused": difference.excused}
            for place, difference in series.differences
        ],
    }
    if tally.passes:
        figures |= {
            "prefill_seconds": round(prefill, 3),
            "accepted_length": round(tally.accepted_length, 3),
            "nodes": round(tally.drafted / tally.passes, 2),
            "draft_share": round(tally.draft_ns / steps, 4),
            "forward_share": round(tally.forward_ns / steps, 4),
            "accept_share": round(tally.accept_ns / steps, 4),
        }
        if curve is not None:
            seconds = sum(curve.cost(rows) * count for rows, count in series.rows().items())
            figures["by_curve"] = round(tally.tokens * curve.cost(1) / seconds, 3)
    for key, other in (("over_plain", plain), ("over_loop", loop)):
        if other is not None:
            figures[key] = _speedup(series, other)
    return figures


def _speedup(series: Series, other: Series) -> dict[str, float]:
    """Return by how much a way is faster: the median over rounds, and over prompts the median and the least."""
    rounds = [other.seconds(turn) / series.seconds(turn) for turn in range(len(series.rounds))]
    prompts = [theirs / own for own, theirs in zip(series.medians(), other.medians(), strict=True)]
    return {
        "rounds": round(median(rounds), 3),
        "least_round": round(min(rounds), 3),
        "median_prompt": round(median(prompts), 3),
        "least_prompt": round(min(prompts), 3),
    }
