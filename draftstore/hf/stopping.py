"""Stopping criteria of transformers, evaluated for every token as in plain `generate`.

The three in nearly every request (length, EOS, time) need no tensors; all others get the text including the token.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from draftstore.hf.choosing import Chooser, Ids

Test = Callable[[int, int], bool]
"""`test(length, token)`: whether the text ends at this token and length."""


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
