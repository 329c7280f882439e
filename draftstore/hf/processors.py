"""Logits processors of requests: tokens that a grammar permits, penalties for tokens in the answer, and biases."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LogitsProcessor

from draftstore.decoding.grammars import Grammar
from draftstore.errors import ProbabilityError


class GrammarMask(LogitsProcessor):
    """Sets the logits of all tokens that a grammar forbids to minus infinity; for one answer."""

    def __init__(self, grammar: Grammar, prompt_tokens: int) -> None:
        """Follow the answer after `prompt_tokens` ids."""
        self._state, self._seen = grammar.start(), prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the new logits, [1, vocab_size], after int64 [1, length], which extends the text of the last call.

        Raises:
            GrammarError: the grammar is too complex.
            ProbabilityError: no token remains.
        """
        self._state.extend(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        allowed = torch.from_numpy(self._state.allowed()).to(scores.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if scores.max().isneginf():
            raise ProbabilityError("the model's settings ban every token that the grammar allows")
        return scores


class Penalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, for the answer only, and its logit bias."""

    def __init__(
        self,
        prompt_tokens: int,
        *,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
    ) -> None:
        """Prepare for one answer.

        Args:
            prompt_tokens: number of ids before the answer.
            presence: subtracted from the logit of each token in the answer.
            frequency: the same for each occurrence.
            bias: added to logits, by token id.
        """
        self._start = prompt_tokens
        self._presence = presence
        self._frequency = frequency
        self._bias_ids = torch.tensor(list(bias or {}), dtype=torch.int64)
        self._bias = torch.tensor(list((bias or {}).values()), dtype=torch.float32)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the new logits, [texts, vocab_size], after int64 [texts, length]."""
        answer = input_ids[:, self._start :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        scores = scores - self._frequency * counts - self._presence * (counts > 0)
        if len(self._bias_ids):
            ids = self._bias_ids.to(scores.device)
            scores[:, ids] += self._bias.to(scores)
        return scores
