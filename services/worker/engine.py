"""The worker's view of a model; `services.worker.model` implements it with transformers."""

from dataclasses import dataclass
from typing import Protocol

from draftstore.decoding.grammars import Grammars
from draftstore.text.tokenizer import TextTokenizer
from services.worker.answers import Answer


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
    """A loaded model with its drafters, used by one thread; its attributes by all."""

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
