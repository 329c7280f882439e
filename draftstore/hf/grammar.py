"""A logits processor that allows only the tokens permitted by a grammar."""

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
