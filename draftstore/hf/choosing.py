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
from transformers.generation.configuration_utils import GenerationConfig
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
        self, text: Ids, processors: Any, config: GenerationConfig, random: torch.Generator | None = None
    ) -> None:
        """Choose with the logits processors of a request; `random` None is torch's default."""
        self._text, self._processors, self._random = text, processors, random
        self._sample, collects = bool(config.do_sample), bool(config.return_dict_in_generate)
        self.scores: tuple[torch.Tensor, ...] | None = () if collects and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if collects and config.output_logits else None
        collected = self.scores is not None or self.logits is not None
        self.greedy = not self._sample and not collected and len(processors) == 0

    def choose(self, logits: torch.Tensor, emitted: Sequence[int]) -> int:
        """Return the token that the model emits, by the same steps in the same order as plain `generate`.

        `logits`, [1, vocabulary], are raw; `emitted` are the earlier tokens of this step.
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


def stop_rule(criteria: Any, text: Ids, chooser: Chooser) -> Callable[[Sequence[int]], bool]:
    """Return a `StoppingCriteriaList` as `ends` of `draftstore.decoding.loop.Text`.

    All criteria are called for each token, since some have state; they may need the scores of the chooser.
    """
    tests: list[Test] = []
    others = StoppingCriteriaList()
    for criterion in criteria:
        test = _test_of(criterion)
        if test is None:
            others.append(criterion)
        else:
            tests.append(test)

    def ends(emitted: Sequence[int]) -> bool:
        length, token = len(text) + len(emitted), emitted[-1]
        over = False
        for test in tests:
            over |= test(length, token)
        if others:
            over |= bool(others(text.tensor(emitted), chooser.scores).all())
        return over

    return ends


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
