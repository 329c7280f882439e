"""A logits processor: penalties for tokens in the answer, and biases for single tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import LogitsProcessor


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
