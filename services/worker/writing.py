"""One answer while it is decoded: forward passes in, text out."""

import dataclasses
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Literal

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest
from draftstore.text.incremental import Pieces
from draftstore.text.tokenizer import TextTokenizer
from services.worker.text import StopStrings
from services.worker.work import Facts

Reason = Literal["stop", "length"]


class EndedError(Exception):
    """Ends the decoding of a text that needs no more tokens."""


@dataclasses.dataclass
class Usage:
    """Figures of one answer.

    Attributes:
        prompt_tokens: of the prompt.
        completion_tokens: of the answer, the token that ended it included.
        passes: forward passes after the prefill.
        drafted: tokens that were drafted and verified.
        accepted: those of them that are part of the answer.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def accepted_length(self) -> float:
        """Tokens that a forward pass yielded; the first token of an answer comes from the prefill."""
        return (self.completion_tokens - 1) / self.passes if self.passes else 0.0

    def public(self, drafters: Sequence[str]) -> dict[str, Any]:
        """Return OpenAI's object, with ours in it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
            "draftstore": {
                "passes": self.passes,
                "drafted": self.drafted,
                "accepted": self.accepted,
                "accepted_length": round(self.accepted_length, 3),
                "drafters": list(drafters),
            },
        }


class Writing:
    """Turns forward passes into text, and ends the decoding where the text ends.

    Attributes:
        usage: figures so far.
        reason: why the answer ended; `length` until something else is known.
        first_token: when it came (monotonic seconds); None before.
        text: the answer so far.
    """

    def __init__(
        self,
        request: GenerationRequest,
        facts: Facts,
        tokenizer: TextTokenizer,
        show: Callable[[str], None],
        *,
        stops: Sequence[str] = (),
        lead: str = "",
    ) -> None:
        """Write an answer.

        Args:
            request: what is decoded.
            facts: of the model.
            tokenizer: of the model.
            show: takes text as it comes, never empty.
            stops: texts that end the answer, and are no part of it.
            lead: one character that is left out where the answer begins with it.
        """
        self.usage = Usage(len(request.prompt))
        self.reason: Reason = "length"
        self.first_token: float | None = None
        self._most = request.max_tokens
        self._ends = facts.ends
        self._pieces = Pieces(tokenizer, request.prompt)
        self._stops = StopStrings(stops)
        self._lead = lead
        self._shown: list[str] = []
        self._show = show

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._shown)

    def take(self, step: Step) -> None:
        """Take in a forward pass.

        Raises:
            EndedError: the answer ends here.
        """
        prefill = self.first_token is None
        if prefill:
            self.first_token = monotonic()
        self.usage.passes += not prefill
        self.usage.drafted += len(step.tree)
        room = self._most - self.usage.completion_tokens
        taken, text = self._read(step.tokens[:room].tolist())
        self.usage.completion_tokens += taken
        self.usage.accepted += min(taken, len(step.path))
        self._hand_out(text)
        if self.reason == "stop" or taken == room:
            raise EndedError

    def finish(self) -> None:
        """Hand out what was held back: no stop string comes of it any more."""
        if not self._stops.found():
            rest = self._stops.push(self._without_lead(self._pieces.finish()))
            self._hand_out(rest + self._stops.finish())
            if self._stops.found():
                self.reason = "stop"

    def _read(self, tokens: list[int]) -> tuple[int, str]:
        """Return how many tokens belong to the answer, and their text, as far as it can be shown.

        One token after the other, so that where an answer ends does not depend on how many came at once.
        """
        text = ""
        for taken, token in enumerate(tokens, 1):
            if token in self._ends:
                self.reason = "stop"
                return taken, text
            text += self._stops.push(self._without_lead(self._pieces.push(token)))
            if self._stops.found():
                self.reason = "stop"
                return taken, text
        return len(tokens), text

    def _without_lead(self, text: str) -> str:
        """Return a piece without what the answer should not begin with."""
        if text and self._lead:
            text, self._lead = text.removeprefix(self._lead), ""
        return text

    def _hand_out(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._show(text)
