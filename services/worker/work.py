"""The worker's interface to a model; `services.worker.engine` implements it with transformers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest, Likelihood
from draftstore.text.tokenizer import TextTokenizer

OnStep = Callable[[Step, Sequence[Likelihood]], None]
"""Gets a forward pass, and the likelihoods of its tokens if the request asks for them."""


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
    """A loaded model with its drafters, used by one thread for one text at a time."""

    @property
    def facts(self) -> Facts:
        """Facts about the model."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Tokenizer of the model; thread-safe."""

    def generate(self, request: GenerationRequest, on_step: OnStep) -> None:
        """Decode.

        Args:
            request: what to generate.
            on_step: called after every forward pass; the first one is the prefill with an empty draft. An exception
                that it raises ends decoding and propagates.
        """

    def close(self) -> None:
        """Close stores and connections."""
