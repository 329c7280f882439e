"""A logits processor of requests: only tokens that a grammar allows."""

from typing import Any

import torch
from transformers import LogitsProcessor

from draftstore.decoding.grammars import Grammar
from draftstore.errors import ProbabilityError


class GrammarMask(LogitsProcessor):
    """Gives all tokens that a grammar does not allow the logit minus infinity; for one answer."""

    def __init__(self, grammar: Grammar, prompt_tokens: int) -> None:
        """Follow the answer behind `prompt_tokens` ids."""
        self._state, self._seen = grammar.start(), prompt_tokens

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Return the new logits, [1, vocab_size], behind int64 [1, length]: the text of the last call, and more.

        Raises:
            GrammarError: the grammar is too complex.
            ProbabilityError: no token is left.
        """
        self._state.extend(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        allowed = torch.from_numpy(self._state.allowed()).to(scores.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        if scores.max().isneginf():
            raise ProbabilityError("the model's settings ban every token that the grammar allows")
        return scores
