"""The model's candidates at all positions of a prompt: no further pass, only more rows for the model's head.

    candidates = PromptCandidates(ids, vocab_size)
    with candidates.reading(model): ...   a pass over the next tokens of the prompt, asked for the logits of all of them
    candidates.rows(last)                 int32 [n, 8], for the drafter's session

The pass computes the states of all positions anyway, and plain decoding asks the head for the last one alone. Here the
head meets all of them, takes a few at a time, keeps their top 8, and hands on the last: memory stays that of a slice,
and the logits that choose the first token are computed as without this.

Token Recycling keeps one row for each token, so only the last place of each token in the prompt is asked for.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.hf.passes import CANDIDATES, Wants, choices

SLICE = 2**25
"""Logits in memory at a time: 128 MiB in float32. Each slice reads the head's weights once."""
ONLY_CANDIDATES = Wants(best=False, candidates=True)


class PromptCandidates:
    """The candidates at the positions of one prompt, gathered while it is read.

    Attributes:
        places: bool [n], the positions asked for: the last place of each token, without the prompt's last position,
            whose candidates come with the first token.
    """

    def __init__(
        self, ids: NDArray[np.integer[Any]], vocab_size: int, seen: NDArray[np.bool_] | None = None
    ) -> None:
        """Start before the first token of a prompt.

        Args:
            ids: int [n], the prompt, padding included.
            vocab_size: size of the model's vocabulary.
            seen: bool [n], False at padding; None without padding.
        """
        self._seen = np.ones(len(ids), np.bool_) if seen is None else seen
        self.places = last_places(ids, self._seen)
        self.places[-1:] = False
        self._at_once = max(1, SLICE // vocab_size)
        self._read = 0
        self._found: list[tuple[NDArray[np.int64], torch.Tensor]] = []

    @classmethod
    def of(
        cls,
        ids: NDArray[np.integer[Any]],
        drafter: object,
        vocab_size: int,
        seen: NDArray[np.bool_] | None = None,
    ) -> "PromptCandidates | None":
        """Return what gathers the candidates for a drafter's session; None if it needs none."""
        return cls(ids, vocab_size, seen) if getattr(drafter, "needs_candidates", False) else None

    @contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        """Gather from the model's head, in this thread: it meets the next tokens of the prompt, and computes the last.

        A compiled model, and one whose head is not its own or never meets the states of all tokens, tells nothing.
        """
        head = model.get_output_embeddings()
        if head is None:
            yield
            return
        keeps = model._supports_logits_to_keep()  # otherwise plain decoding asks for all logits, and so do we
        thread, asking = get_ident(), False

        def catch(_head: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            nonlocal asking
            if torch.compiler.is_compiling() or asking or get_ident() != thread:
                return None
            asking = True
            try:
                self._take(head, inputs[0])
            finally:
                asking = False
            return (inputs[0][:, -1:], *inputs[1:]) if keeps else None

        # First of all hooks: what others make of the input is made of each slice, and of the last row.
        handle = head.register_forward_pre_hook(catch, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _take(self, head: Any, states: torch.Tensor) -> None:
        """Keep the candidates at the next tokens; `states` [1, count, d], the inputs of the head."""
        begin, self._read = self._read, self._read + states.shape[1]
        places = begin + np.flatnonzero(self.places[begin : self._read])
        for first in range(0, len(places), self._at_once):
            some = places[first : first + self._at_once]
            picked = states[:, torch.from_numpy(some - begin).to(states.device)]
            found = choices(head(picked)[0], ONLY_CANDIDATES)
            assert found is not None
            self._found.append((some, found))

    def rows(self, last: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32 [tokens, 8], the candidates at each token of the prompt without its padding; -1 if unknown.

        Args:
            last: int32 [1, 8], the candidates at the last token.
        """
        if self._read != len(self.places):  # the head met other rows than the prompt's: nobody knows which
            return last
        rows = np.full((len(self.places), CANDIDATES), -1, np.int32)
        if self._found:
            places, found = zip(*self._found, strict=True)
            rows[np.concatenate(places)] = torch.cat(found).cpu().numpy()
        rows[-1:] = last
        return rows[self._seen]


def gathering(prompt_candidates: PromptCandidates | None, model: Any) -> AbstractContextManager[None]:
    """Gather candidates, if they are wanted; see `PromptCandidates.reading`."""
    return nullcontext() if prompt_candidates is None else prompt_candidates.reading(model)


def last_places(ids: NDArray[np.integer[Any]], seen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return bool [n], True at the last place of each token among those that are seen."""
    places = np.flatnonzero(seen)
    wanted = np.zeros(len(ids), np.bool_)
    wanted[places[len(places) - 1 - np.unique(ids[places][::-1], return_index=True)[1]]] = True
    return wanted
