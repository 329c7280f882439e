"""Conversion of one answer's forward passes to text."""

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Literal, NamedTuple

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest, Likelihood
from draftstore.text.incremental import Pieces
from draftstore.text.tokenizer import TextTokenizer
from services.worker.text import StopStrings
from services.worker.work import Facts

Reason = Literal["stop", "length"]


class Scored(NamedTuple):
    """A token of an answer with its likelihood.

    Attributes:
        offset: characters of the answer before it.
        likelihood: its likelihood.
    """

    offset: int
    likelihood: Likelihood


class EndedError(Exception):
    """Ends the decoding of a complete answer."""


@dataclasses.dataclass
class Usage:
    """Figures of the answers to one request.

    Attributes:
        prompt_tokens: tokens of the prompts.
        completion_tokens: tokens of the answers, including those that ended them.
        answers: answers begun.
        passes: forward passes after the prefill.
        drafts: passes that verified a draft.
        drafted: tokens that were drafted and verified.
        accepted: drafted tokens that became part of an answer.
        accepted_at: the same by their place in the accepted path, from 0 on.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    answers: int = 0
    passes: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = dataclasses.field(default_factory=Counter)

    @property
    def accepted_length(self) -> float:
        """Mean tokens per forward pass; the first tokens come from the prefills and are not counted."""
        return (self.completion_tokens - self.answers) / self.passes if self.passes else 0.0

    def public(self, drafters: Sequence[str]) -> dict[str, Any]:
        """Return OpenAI's `usage` object, with our figures added."""
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
    """Turns forward passes into text, and ends decoding where the text ends.

    Attributes:
        reason: reason why the answer ended; `length` until another is known.
        first_token: time of the first token (monotonic seconds); None before.
        text: answer so far.
        scored: its tokens, if likelihoods are asked for.
    """

    def __init__(
        self,
        request: GenerationRequest,
        facts: Facts,
        tokenizer: TextTokenizer,
        show: Callable[[str, Sequence[Scored]], None],
        usage: Usage,
        *,
        stops: Sequence[str] = (),
        lead: str = "",
    ) -> None:
        """Prepare an answer.

        Args:
            request: generation request.
            facts: facts about the model.
            tokenizer: tokenizer of the model.
            show: takes new text, and the tokens whose text begins in it if likelihoods are asked for; not both empty.
            usage: figures of the request, to which those of this answer are added.
            stops: stop strings, which are not part of the answer.
            lead: a character to drop if the answer begins with it.
        """
        self.reason: Reason = "length"
        self.first_token: float | None = None
        self._usage = usage
        self._room = request.max_tokens
        self._sure = request.min_tokens  # tokens until the answer may end
        self._ends = frozenset(request.ends(facts.ends))
        self._pieces = Pieces(tokenizer, request.prompt)
        self._stops = StopStrings(stops)
        self._lead = lead
        self._shown: list[str] = []
        self._length = 0  # characters read, shown or not
        self._end = 0  # characters shown
        self._waiting: deque[Scored] = deque()
        self.scored: list[Scored] = []
        self._show = show

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._shown)

    def take(self, step: Step, likelihoods: Sequence[Likelihood] = ()) -> None:
        """Process a forward pass and the likelihoods of its tokens, if asked for.

        Raises:
            EndedError: the answer ends here.
        """
        prefill = self.first_token is None
        if prefill:
            self.first_token = monotonic()
            self._usage.answers += 1
        self._usage.passes += not prefill
        self._usage.drafts += len(step.tree) > 0
        self._usage.drafted += len(step.tree)
        taken, text = self._read(step.tokens[: self._room].tolist(), likelihoods)
        self._usage.completion_tokens += taken
        accepted = min(taken, len(step.path))
        self._usage.accepted += accepted
        self._usage.accepted_at.update(range(accepted))
        self._room -= taken
        self._hand_out(text)
        if self.reason == "stop" or not self._room:
            raise EndedError

    def finish(self) -> None:
        """Emit the text held back at the end."""
        if not self._stops.found():
            text = self._read_text(self._pieces.finish()) + self._stops.finish()
            self._hand_out(text, last=not self._stops.found())
            if self._stops.found():
                self.reason = "stop"

    def _read(self, tokens: list[int], likelihoods: Sequence[Likelihood]) -> tuple[int, str]:
        """Return the number of tokens that belong to the answer, and their text as far as it can be shown."""
        # One by one, so that the end of an answer does not depend on how many tokens came at once.
        text = ""
        for taken, token in enumerate(tokens, 1):
            if token in self._ends:
                self.reason = "stop"
                return taken, text
            self._sure -= 1
            if likelihoods:
                self._waiting.append(Scored(self._length, likelihoods[taken - 1]))
            text += self._read_text(self._pieces.push(token))
            if self._stops.found():
                self.reason = "stop"
                return taken, text
        return len(tokens), text

    def _read_text(self, text: str) -> str:
        """Return what can be shown of new text, without the lead; among the least tokens nothing stops the answer."""
        if text and self._lead:
            text, self._lead = text.removeprefix(self._lead), ""
        self._length += len(text)
        return text if self._sure >= 0 else self._stops.push(text)

    def _hand_out(self, text: str, *, last: bool = False) -> None:
        """Show text with the tokens that begin in it, and in the end those without a text of their own."""
        if text:
            self._shown.append(text)
            self._end += len(text)
        scored = []
        while self._waiting and (last or self._waiting[0].offset < self._end):
            scored.append(self._waiting.popleft())
        self.scored += scored
        if text or scored:
            self._show(text, scored)
