"""One answer: forward passes of an engine come in, events with the visible text go out, and figures are recorded."""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol, TypeAlias

from draftstore.decoding.conversation import Pieces
from draftstore.decoding.grammars import Grammars
from draftstore.decoding.loop import Step, Tally
from draftstore.drafting.outcomes import counted
from draftstore.hf.requests import GenerationRequest
from draftstore.text.digests import CALL, written_calls
from draftstore.text.tokenizer import TextTokenizer
from services.common.http import ProblemError


class StopStrings:
    """Holds back text that may become a stop string, and ends the text before one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._found = False

    def found(self) -> bool:
        """Return True if a stop string was found."""
        return self._found

    def push(self, text: str) -> str:
        """Append `text`; return what can be shown now."""
        if self._found:
            return ""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self._found, self._held = True, ""
            return held[: min(places)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text held back at the end, which did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def parse_calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in an answer in OpenAI's format; none if one of them is not JSON with a name."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {**call, "arguments": json.dumps(call["arguments"])},
        }
        for call in written_calls(text)
    ]


@dataclass
class Usage(Tally):
    """Figures of an answer, or of all answers to a request: passes after the prefill and tokens that belong to it.

    `predicted` counts the accepted draft tokens that also follow the preceding token in the request's own prediction,
    up to the length of the prediction; `missed` counts the rest of the prediction.
    """

    prompt_tokens: int = 0
    answers: int = 0  # with a first token, which comes from the prefill
    steps: Counter[int] = field(default_factory=Counter)  # passes with a draft, by accepted tokens
    predicted: int = 0
    missed: int = 0
    sources: Counter[tuple[str, str]] = field(default_factory=Counter)  # see `draftstore.drafting.outcomes`

    def __add__(self, other: "Usage") -> "Usage":
        names = [each.name for each in fields(self)]
        return Usage(*(getattr(self, name) + getattr(other, name) for name in names))

    def _sources(self) -> dict[str, Any]:
        """Return what each source drafted and in how many passes it drafted nothing, by reason."""
        found: dict[str, Any] = {}
        for (source, what), count in self.sources.items():
            figures = found.setdefault(source, {"drafted": 0, "matched": 0, "empty": {}})
            (figures if what in figures else figures["empty"])[what] = count
        return found

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answers, including those that ended them."""
        return self.answers + self.tokens

    def public(self) -> dict[str, Any]:
        """Return OpenAI's `usage`, with the passes of this worker, and vLLM's `metrics`.

        Passes without a draft do not count as steps of speculative decoding.
        """
        steps = self.steps.total()
        return {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "completion_tokens_details": {
                    "accepted_prediction_tokens": self.predicted,
                    "rejected_prediction_tokens": self.missed,
                },
                "draftstore": {
                    "passes": self.passes,
                    "accepted_length": round(self.accepted_length, 3),
                    "sources": self._sources(),
                },
            },
            "metrics": {
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + self.accepted / steps if steps else 1.0,
                    "draft_acceptance_rate": self.acceptance_rate,
                    "acceptance_histogram": [
                        self.steps[size] for size in range(max(self.steps, default=0) + 1)
                    ],
                    "num_spec_steps": steps,
                    "num_accepted_draft_tokens": self.accepted,
                    "num_draft_tokens": self.drafted,
                }
            },
        }


@dataclass(frozen=True)
class Delta:
    """A piece of an answer; `choice` is its number, as in `Answered`."""

    choice: int
    text: str


@dataclass(frozen=True)
class Answered:
    """A complete answer: everything that the model wrote, the part shown as content, and the tool calls."""

    choice: int
    text: str
    content: str
    reason: str
    calls: Sequence[Mapping[str, Any]] = ()


Event: TypeAlias = Delta | Answered | ProblemError
"""A piece of an answer, its end, or why it failed."""


@dataclass(frozen=True)
class Terms:
    """What the answers to a request have in common."""

    id: str
    tokenizer: TextTokenizer
    ends: frozenset[int] = frozenset()  # the model's own
    stops: Sequence[str] = ()  # strings that end an answer and are not part of it
    lead: str = ""  # dropped if an answer begins with it
    tools: bool = False  # whether an answer may call tools
    bearer: str = ""  # name of the client's token
    # Returns the line of an answer in a response log, and the digest of its document; None: it is not remembered.
    record: Callable[[Answered], tuple[bytes, bytes]] | None = None


class EndedError(Exception):
    """Ends the decoding of an answer that is complete or cancelled."""


class Answer:
    """One answer: a job for the decoder."""

    def __init__(
        self, choice: int, request: GenerationRequest, terms: Terms, post: Callable[[Event], None]
    ) -> None:
        """Prepare the answer number `choice` in a reply; `post` takes its events, in any thread."""
        prediction = [] if request.prediction is None else request.prediction.tolist()
        self.choice, self.request, self.terms, self.post = choice, request, terms, post
        self.sources: Sequence[str] = ()  # labels of its drafters
        self.usage = Usage(prompt_tokens=len(request.prompt), missed=len(prediction))
        self.reason = "length"  # until it ends by itself
        self.tokens: list[int] = []  # including those that ended it
        self.cancelled = False  # whether the client no longer waits for it
        self.created = monotonic()
        self.waited: float | None = None  # seconds until its decoding began
        self.first: float | None = None  # seconds until its first token
        self._room = request.max_tokens
        self._sure = request.min_tokens  # tokens until the answer may end
        self._ends = frozenset(request.ends(terms.ends))
        self._pieces = Pieces(terms.tokenizer, request.prompt)
        self._stops = StopStrings(terms.stops)
        self._tag = StopStrings([f"\n{CALL}", CALL] if terms.tools else [])
        self._lead, self._text = terms.lead, ""
        self._pairs = set(pairwise(prediction))
        self._last = -1  # the last token

    def take(self, step: Step) -> None:
        """Take a forward pass, the prefill first; raises `EndedError` when the answer ends."""
        if self.cancelled:
            raise EndedError
        tokens = step.tokens[: self._room].tolist()
        taken, text = self._read(tokens)
        self.tokens += tokens[:taken]
        if self.first is None:
            self.first = monotonic() - self.created
            self.usage.answers = 1
        else:
            self._count(step, tokens[:taken])
        self._last = tokens[taken - 1]
        self._room -= taken
        self._show(text)
        if self.reason == "stop" or not self._room:
            raise EndedError

    def finish(self) -> Answered:
        """Show the text held back and return the complete answer."""
        if not self._stops.found():
            self._show(self._readable(self._pieces.finish()) + self._stops.finish())
            if self._stops.found() or self._room:  # the model's own settings may end it, too
                self.reason = "stop"
        content, calls = self._text, parse_calls(self._text) if self._tag.found() else []
        shown = content.partition(CALL)[0].removesuffix("\n")  # templates write that line feed themselves
        if calls:
            content = shown
        elif held := content[len(shown) :] if self._tag.found() else self._tag.finish():
            self.post(Delta(self.choice, held))
        return Answered(self.choice, self._text, content, "tool_calls" if calls else self.reason, calls)

    def _count(self, step: Step, tokens: list[int]) -> None:
        """Count a pass; `tokens` are those of its tokens that belong to the answer."""
        accepted, usage = min(len(tokens), len(step.path)), self.usage
        usage.count(len(tokens), len(step.tree), accepted)
        usage.sources.update(counted(self.sources, step.sources))
        if len(step.tree):
            usage.steps[accepted] += 1
        pairs = pairwise([self._last, *tokens[:accepted]])
        predicted = min(usage.missed, sum(pair in self._pairs for pair in pairs))
        usage.predicted += predicted
        usage.missed -= predicted

    def _read(self, tokens: list[int]) -> tuple[int, str]:
        """Return the number of tokens that belong to the answer, and the part of their text that can be shown."""
        # One by one, so that the end of an answer does not depend on how many tokens came together.
        text = ""
        for taken, token in enumerate(tokens, 1):
            if token not in self._ends:
                self._sure -= 1
                text += self._readable(self._pieces.push(token))
            if token in self._ends or self._stops.found():
                self.reason = "stop"
                return taken, text
        return len(tokens), text

    def _readable(self, text: str) -> str:
        """Return the part of new text that can be shown, without the lead; `min_tokens` delays stop strings."""
        if text and self._lead:
            text, self._lead = text.removeprefix(self._lead), ""
        return text if self._sure >= 0 else self._stops.push(text)

    def _show(self, text: str) -> None:
        self._text += text
        if shown := self._tag.push(text):
            self.post(Delta(self.choice, shown))


@dataclass(frozen=True)
class Facts:
    """Facts about a model."""

    name: str  # for clients
    positions: int  # maximum tokens of prompt and answer together
    vocab_size: int
    ends: frozenset[int]  # ids that end an answer
    drafters: tuple[str, ...] = ()
    device: str = "cpu"
    stops: tuple[str, ...] = ()  # strings that end an answer


class Engine(Protocol):
    """A loaded model with its drafters, used by one thread; its attributes by all. See `services.worker.model`."""

    facts: Facts
    tokenizer: TextTokenizer
    grammars: Grammars

    @property
    def room(self) -> int:
        """Number of answers that can be started now."""

    def join(self, answer: Answer) -> None:
        """Start an answer; raises if it cannot be decoded."""

    def leave(self, answer: Answer) -> None:
        """End an answer between two steps."""

    def step(self) -> list[tuple[Answer, Exception | None]]:
        """Run forward passes that answers take; return the ended ones, each with what ended it (None: its limit)."""

    def remember(self, answer: Answer, digest: bytes) -> None:
        """Append a finished answer to the live store, if there is one; `digest` identifies its document."""

    def close(self) -> None:
        """Close stores and connections."""
