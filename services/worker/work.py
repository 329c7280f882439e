"""What a model has to do for the worker: `services.worker.engine` does it with transformers."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a model is.

    Attributes:
        name: under which it is asked for.
        positions: most tokens of prompt and answer together.
        vocab_size: ids that it knows.
        ends: ids that end an answer.
        drafters: names of what drafts for it.
        device: where it runs, for people.
    """

    name: str
    positions: int
    vocab_size: int
    ends: frozenset[int]
    drafters: tuple[str, ...] = ()
    device: str = "cpu"

    def public(self) -> dict[str, Any]:
        """Return what a client may know beside the name."""
        return {
            "max_model_len": self.positions,
            "vocab_size": self.vocab_size,
            "drafters": list(self.drafters),
        }


class Engine(Protocol):
    """A loaded model with its drafters. It is used by one thread, for one text at a time."""

    @property
    def facts(self) -> Facts:
        """What the model is."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Text to ids and back; it may be used by any thread."""

    def generate(self, request: GenerationRequest, on_step: Callable[[Step], None]) -> None:
        """Decode.

        Args:
            request: what is asked.
            on_step: is told of every forward pass, the first of which is the prefill with an empty draft. What it
                raises ends the decoding and comes out here.
        """

    def close(self) -> None:
        """Let go of stores and connections."""
