"""Log-probabilities of the tokens that are emitted, noted as they are chosen."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from draftstore.hf.requests import Likelihood


class Likelihoods(LogitsProcessor):
    """Notes the distribution behind every emitted token; changes no scores.

    It stands behind penalties and biases and before temperature and filters. It is called once for each emitted token,
    in order, never for drafted tokens that are not reached.
    """

    def __init__(self, top: int) -> None:
        """Note the log-probability of each token and of the `top` most likely ones."""
        self._top = top
        self._rows: list[torch.Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ARG002
        """Note one row of scores, [1, vocabulary]."""
        self._rows.append(torch.log_softmax(scores[0].float(), dim=-1))
        return scores

    def take(self, tokens: Sequence[int]) -> list[Likelihood]:
        """Return the likelihood of each token that was emitted since the last call, and forget them."""
        rows = torch.stack(self._rows[: len(tokens)])
        self._rows.clear()
        chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
        best = rows.topk(min(self._top, rows.shape[1]))
        return [
            Likelihood(token, logprob, tuple(zip(ids, values, strict=True)))
            for token, logprob, ids, values in zip(
                tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]
