"""The worker's interface to a model; `services.worker.engine` implements it with transformers."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest, Likelihood
from draftstore.text.tokenizer import TextTokenizer


class Answer(Protocol):
    """An answer in decoding."""

    @property
    def request(self) -> GenerationRequest:
        """What to generate."""

    def take(self, step: Step, likelihoods: Sequence[Likelihood]) -> None:
        """Take a forward pass: the first one is the prefill with an empty draft.

        An exception ends the answer, and comes back from `Engine.step`.

        Args:
            step: the pass.
            likelihoods: those of its tokens, if the request asks for them.
        """


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a model.

    Attributes:
        name: name of the model for clients.
        positions: maximum tokens of prompt and answer together.
        vocab_size: size of the vocabulary.
        ends: ids that end an answer.
        drafters: names of its drafters.
        release: name of the lookup service's release among them; empty without one.
        device: device, for messages.
    """

    name: str
    positions: int
    vocab_size: int
    ends: frozenset[int]
    drafters: tuple[str, ...] = ()
    release: str = ""
    device: str = "cpu"

    def public(self) -> dict[str, Any]:
        """Return the public facts besides the name."""
        return {
            "max_model_len": self.positions,
            "vocab_size": self.vocab_size,
            "drafters": list(self.drafters),
        }


class Engine(Protocol):
    """A loaded model with its drafters, used by one thread, for several answers at a time."""

    @property
    def facts(self) -> Facts:
        """Facts about the model."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the model; thread-safe."""

    @property
    def room(self) -> int:
        """Number of answers that can be started now."""

    @property
    def last_pass(self) -> tuple[int, float] | None:
        """Answers in the pass of the last step, and the share of the columns that they saw which hold tokens.

        None if there was no such pass, or if answers are not decoded together.
        """

    def join(self, answer: Answer) -> None:
        """Start an answer, if there is room.

        Raises:
            Exception: it cannot be decoded.
        """

    def leave(self, answer: Answer) -> None:
        """End an answer between two steps; one that has ended already is passed over."""

    def step(self) -> list[tuple[Answer, Exception | None]]:
        """Run forward passes, and have answers take them.

        Returns:
            The answers that have ended, and what ended them; None where nothing failed.
        """

    def close(self) -> None:
        """Close stores and connections."""
