"""What is asked of a model: a prompt, a limit, and how tokens are chosen. Nothing here imports torch."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

GREEDY = 1e-5
"""Temperatures below this one mean the most likely token."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    None leaves a setting to the model's own generation settings, and where these are silent to the defaults of OpenAI's
    API: temperature 1, and no filter.

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
class GenerationRequest:
    """One text to continue.

    Attributes:
        prompt: int32 [n], at least one id.
        max_tokens: most tokens of the answer.
        sampling: how they are chosen.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
