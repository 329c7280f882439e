"""The model's candidates at all positions of a prompt, without another pass: only the model's head computes more rows.

    candidates = PromptCandidates(ids, vocab_size)
    with candidates.reading(model, top8): ...   a pass over the next tokens of the prompt
    candidates.rows(last)                       int32 [n, 8], for the drafter's session

Prefill computes the states of all positions anyway, but plain decoding runs the head only on the last one. Here a hook
runs the head on the others too, in slices, and keeps the top 8 of each: memory stays that of a slice, and the logits
that choose the first token are computed as usual. As the matrix has one row for each token, only the last position of
each token in the prompt is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.recycling.kernels import WIDTH

SLICE = 2**25
"""Logits in memory at a time: 128 MiB in float32. Each slice reads the head's weights once."""


class PromptCandidates:
    """The candidates at the positions of one prompt, gathered during prefill."""

    def __init__(self, ids: NDArray[np.integer[Any]], vocab_size: int) -> None:
        """Start before the first token of a prompt, int [n], without padding."""
        self._places = np.zeros(len(ids), np.bool_)
        self._places[len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]] = True
        self._places[-1:] = False  # its candidates come with the first token
        self._at_once = max(1, SLICE // vocab_size)
        self._read = 0
        self._found: list[tuple[NDArray[np.int64], torch.Tensor]] = []

    @contextmanager
    def reading(self, model: Any, top: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Gather from the model's head, in this thread, while it processes the next tokens of the prompt.

        `top` returns the candidates, int64 [k, 8], of logits [k, vocabulary]. Nothing is gathered from a compiled
        model, or from one that lacks its own head or never passes it the states of all tokens.
        """
        head = model.get_output_embeddings()
        if head is None:
            yield
            return
        keeps = model._supports_logits_to_keep()  # otherwise plain decoding computes all logits, and so do we
        thread, asking = get_ident(), False

        def catch(_head: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            nonlocal asking
            if torch.compiler.is_compiling() or asking or get_ident() != thread:
                return None
            asking = True
            try:
                self._take(head, inputs[0], top)
            finally:
                asking = False
            return (inputs[0][:, -1:], *inputs[1:]) if keeps else None

        # Before all other hooks: whatever they do to the input also happens to each slice and to the last row.
        handle = head.register_forward_pre_hook(catch, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _take(self, head: Any, states: torch.Tensor, top: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep the candidates at the next tokens; `states` [1, count, d], the inputs of the head."""
        begin, self._read = self._read, self._read + states.shape[1]
        places = begin + np.flatnonzero(self._places[begin : self._read])
        for first in range(0, len(places), self._at_once):
            some = places[first : first + self._at_once]
            picked = states[:, torch.from_numpy(some - begin).to(states.device)]
            self._found.append((some, top(head(picked)[0])))

    def rows(self, last: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32 [n, 8], the candidates at each token of the prompt; -1 if unknown.

        `last` int32 [1, 8] are those at the last token.
        """
        if self._read != len(self._places):  # the head got other rows than the prompt's: unclear which
            return last
        rows = np.full((len(self._places), WIDTH), -1, np.int32)
        if self._found:
            places, found = zip(*self._found, strict=True)
            rows[np.concatenate(places)] = torch.cat(found).cpu().numpy()
        rows[-1:] = last
        return rows
