"""The token that the model emits at each visited node, and whether the text ends there, exactly as in plain `generate`.

`Ids` is the decoded text; logits processors and stopping criteria get tensors of its prefixes. The three criteria in
nearly every request (length, EOS, time) need no tensors.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from draftstore.errors import DecodingError, ProbabilityError

SPARE = 256
"""Spare room after a text in tokens, in addition to a quarter of its length."""
Test = Callable[[int, int], bool]
"""`test(length, token)`: whether the text ends at this token and length."""


class Ids:
    """The ids of a growing text: the prompt with its padding, and the emitted tokens."""

    def __init__(self, input_ids: torch.Tensor) -> None:
        """Start from a prompt, int [1, length]."""
        self._buffer: NDArray[np.int32] = np.empty(0, np.int32)
        self._size, self._device = 0, input_ids.device
        self.extend(input_ids[0].cpu().numpy())

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> NDArray[np.int32]:
        """The text, int32 [any]: a view, which stays as it is while the text grows."""
        return self._buffer[: self._size]

    def extend(self, tokens: NDArray[np.integer[Any]]) -> None:
        """Append emitted tokens."""
        begin, self._size = self._size, self._size + len(tokens)
        if self._size > len(self._buffer):
            self._buffer = np.resize(self._buffer, self._size + self._size // 4 + SPARE)
        self._buffer[begin : self._size] = tokens

    def tensor(self, emitted: Sequence[int] = ()) -> torch.Tensor:
        """Return int64 [1, length], the text followed by `emitted`, on the device of the prompt."""
        return torch.from_numpy(np.append(self.ids, np.asarray(emitted, np.int64)))[None].to(self._device)


class Chooser:
    """Chooses tokens from rows of logits.

    Attributes:
        greedy: whether the choice is the argmax of the raw logits, which a pass can compute for all rows at once, on
            the device.
        scores: [1, vocabulary] for every emitted token, after the processors; None if not requested.
        logits: the same before the processors.
    """

    def __init__(
        self,
        text: Ids,
        processors: Any,
        *,
        sample: bool = False,
        scores: bool = False,
        logits: bool = False,
        random: torch.Generator | None = None,
    ) -> None:
        """Choose with the logits processors of a request.

        Args:
            text: the text being decoded.
            processors: a `LogitsProcessorList`.
            sample: whether to sample instead of taking the most likely token.
            scores: whether to collect the scores.
            logits: whether to collect raw logits.
            random: random number generator; None: torch's default.
        """
        self._text = text
        self._processors = processors
        self._sample = sample
        self._random = random
        self.greedy = not sample and not scores and not logits and len(processors) == 0
        self.scores: tuple[torch.Tensor, ...] | None = () if scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if logits else None

    def choose(self, logits: torch.Tensor, emitted: Sequence[int]) -> int:
        """Return the token that the model emits, by the same steps in the same order as plain `generate`.

        Args:
            logits: [1, vocabulary], raw.
            emitted: earlier tokens of this step.
        """
        ids = self._text.tensor(emitted)
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self._processors(ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if not self._sample:
            return int(torch.argmax(scores, dim=-1))
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if probs[0, 0].isnan():  # then all are; sampling from them would crash a GPU
            if not torch.nn.functional.softmax(logits, dim=-1)[0, 0].isnan():
                raise ProbabilityError(
                    "the settings leave no finite probabilities: use milder penalties, biases or a higher temperature"
                )
            raise DecodingError("the model's logits are not finite: load it with another dtype")
        return int(torch.multinomial(probs, num_samples=1, generator=self._random))


class StopRules:
    """The stopping criteria of a request, callable as `ends` of `draftstore.decoding.loop.Text`.

    Attributes:
        max_length: tokens, including the prompt, at which the text ends; None without such a criterion.
    """

    def __init__(self, criteria: Any, text: Ids, chooser: Chooser) -> None:
        """Wrap criteria.

        Args:
            criteria: a `StoppingCriteriaList`.
            text: the text being decoded.
            chooser: provides the scores that criteria may need.
        """
        self.max_length: int | None = criteria.max_length
        self._text = text
        self._chooser = chooser
        self._tests: list[Test] = []
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            test = _test_of(criterion)
            if test is None:
                self._others.append(criterion)
            else:
                self._tests.append(test)

    def __call__(self, emitted: Sequence[int]) -> bool:
        """Return True if the text ends with the last emitted token. All criteria are called, since some have state."""
        length, token = len(self._text) + len(emitted), emitted[-1]
        over = False
        for test in self._tests:
            over |= test(length, token)
        if self._others:
            over |= bool(self._others(self._text.tensor(emitted), self._chooser.scores).all())
        return over


def _test_of(criterion: Any) -> Test | None:
    """Return a criterion as a test without tensors; None if it needs tensors or is of another class."""
    if type(criterion) is MaxLengthCriteria:
        return lambda length, _token: length >= criterion.max_length
    if type(criterion) is EosTokenCriteria:
        ends = frozenset(criterion.eos_token_id.flatten().tolist())
        return lambda _length, token: token in ends
    if type(criterion) is MaxTimeCriteria:
        deadline = criterion.initial_timestamp + criterion.max_time
        return lambda _length, _token: time.time() > deadline
    return None
