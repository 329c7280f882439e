"""Generation requests: a prompt, a limit, and sampling settings. Imports no torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from draftstore.decoding.grammars import Grammar
from draftstore.options import Options, Shown

GREEDY = 1e-5
"""Temperatures below this take the most likely token."""


class Drawing(Options):
    """How tokens are drawn."""

    temperature: Annotated[float, Shown(unset="0")] = Field(
        0.0,
        ge=0,
        description="Temperature of sampling; 0 always takes the most likely token.",
        examples=[0.7],
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Draw from the most likely tokens, up to this probability mass.",
        examples=[0.9],
    )


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    None takes a setting from the model's generation configuration, or if that lacks it, OpenAI's default: temperature
    1, no filter.

    Attributes:
        temperature: below `GREEDY` the most likely token is taken.
        top_p: probability mass of nucleus sampling; 0 is greedy.
        top_k: number of most likely tokens kept; 0 keeps all.
        min_p: minimum probability relative to the highest.
        repetition_penalty: for every token of prompt and answer; 1 is none.
        presence: subtracted from the logit of each token in the answer so far.
        frequency: the same for each occurrence.
        bias: added to logits, by token id.
        seed: equal requests with the same seed get the same answer; None: random.
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
class GenerationRequest:
    """One text to continue.

    Attributes:
        prompt: int32 [n], at least one id.
        max_tokens: maximum tokens of the answer.
        sampling: sampling settings.
        min_tokens: number of tokens before which no token may end the answer.
        ignore_eos: whether the model's own ends do not end the answer.
        stop_ids: further ids that end the answer.
        budget: maximum nodes of a draft; 0 decodes without drafts, None leaves it to the planner.
        prediction: int32 [any], what is expected as the answer: drafts are taken from it too. None: nothing is.
        live: whether drafts come from the live store, if there is one, and the answer goes there.
        grammar: what the answer must follow; None: nothing.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    budget: int | None = None
    prediction: NDArray[np.int32] | None = None
    live: bool = True
    grammar: Grammar | None = None

    def ends(self, own: Iterable[int]) -> list[int]:
        """Return the ids that end the answer of a model with its `own`."""
        return [*(() if self.ignore_eos else own), *self.stop_ids]
