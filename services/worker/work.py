"""What is asked of a model, and what a model has to do: `services.worker.engine` does it with transformers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.decoding.loop import Step
from draftstore.text.chat import Message

GREEDY = 1e-5
"""Temperatures below this one mean the most likely token."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    None leaves it to the model's own generation settings, and where these say nothing to what OpenAI's API does:
    temperature 1, and no filter.

    Attributes:
        temperature: below `GREEDY` the most likely token is taken.
        top_p: least probability mass that is kept; 0 is greedy.
        top_k: most tokens that are kept; 0 keeps all.
        min_p: least probability that is kept, as a share of the highest.
        repetition_penalty: of every token of prompt and answer; 1 is none.
        presence: taken from the logit of a token that is in the answer so far.
        frequency: the same, for each time that it is.
        bias: added to logits, by token id.
        seed: two requests with the same one and the same rest get the same answer; None takes a new one.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Work:
    """One text to go on with.

    Attributes:
        prompt: int32 [n], at least one id.
        max_tokens: most tokens of the answer.
        sampling: how they are chosen.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


class Tokenizer(Protocol):
    """What the worker asks of a tokenizer; `draftstore.text.tokenizer.TextTokenizer` is one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no text."""

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """What stands before every text."""

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are written as the model knows them, or in the plain form."""

    def encode(self, text: str, bos: bool) -> NDArray[np.int32]:
        """Return the ids of a text, int32 [n]."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""

    def exact_text(self, token: int) -> str | None:
        """Return the text of one id; None where it holds a part of a character."""

    def render_chat(self, messages: list[Message], add_generation_prompt: bool) -> str:
        """Return a conversation as one text."""


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
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back; it may be used by any thread."""

    def generate(self, work: Work, on_step: Callable[[Step], None]) -> None:
        """Decode.

        Args:
            work: what is asked.
            on_step: is told of every forward pass, the first of which is the prefill with an empty draft. What it
                raises ends the decoding and comes out here.
        """

    def close(self) -> None:
        """Let go of stores and connections."""
