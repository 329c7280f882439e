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
"""Temperatures below this select the most likely token."""


class Drawing(Options):
    """How tokens are drawn."""

    temperature: Annotated[float, Shown(unset="0")] = Field(
        0.0, ge=0, description="Sampling temperature; 0 always takes the most likely token.", examples=[0.7]
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

    None means the value of the model's generation configuration or, failing that, OpenAI's default: temperature 1, no
    filter.

    Attributes:
        temperature: below `GREEDY` the most likely token is taken.
        top_p: probability mass of nucleus sampling; 0 is greedy.
        top_k: number of most likely tokens kept; 0 keeps all.
        min_p: minimum probability relative to the highest.
        repetition_penalty: applies to every token of prompt and answer; 1 is none.
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
        min_tokens: minimum tokens of the answer.
        ignore_eos: whether the model's end-of-text ids do not end the answer.
        stop_ids: further ids that end the answer.
        budget: maximum nodes of a draft; 0 decodes without drafts, None leaves it to the planner.
        prediction: int32 [any], the expected answer, an additional source of drafts; None: no prediction.
        live: whether to draft from the live store, if there is one, and to append the answer to it.
        grammar: grammar that the answer must follow; None: no grammar.
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
        """Return the ids that end the answer, given the model's `own` end-of-text ids."""
        return [*(() if self.ignore_eos else own), *self.stop_ids]
