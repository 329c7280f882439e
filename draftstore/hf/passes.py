"""What a forward pass yields: logits, the most likely tokens, hidden states; on the device until they are asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.hf.projecting import project

CANDIDATES = 8
"""Most likely tokens that a row tells drafters."""
CHUNK = 128
"""Logits among which the largest is looked for at once; it divides nearly all vocabularies."""


class Wants(NamedTuple):
    """What a pass is asked for beside its logits.

    Attributes:
        best: the most likely token of every row.
        candidates: the 8 most likely tokens of every row.
        hidden: the last hidden state of every row.
        layers: the hidden states of every layer.
    """

    best: bool = True
    candidates: bool = False
    hidden: bool = False
    layers: bool = False


class Pass:
    """What a forward pass over n + 1 rows yields. It is on the device until it is asked for."""

    def __init__(
        self,
        logits: torch.Tensor,
        wants: Wants,
        hidden: torch.Tensor | None = None,
        layers: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Queue what was asked for.

        Args:
            logits: [n + 1, vocabulary].
            wants: what will be asked for.
            hidden: [n + 1, d], the last hidden states.
            layers: of each layer [1, n + 1, d]. A single row takes all of them, as that of the prefill does in plain
                generate.
        """
        self._logits = logits
        self._hidden = hidden
        self._layers = layers
        self._choices = choices(logits, wants)
        self._offset = int(wants.best)
        self._best: list[int] | None = None
        self._host: NDArray[np.int64] | None = None

    def best(self) -> list[int]:
        """Return [n + 1], the most likely token at each row, the lowest id among equals as float32."""
        if self._best is None:
            self._best = self._fetch()[:, 0].tolist()
        return self._best

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first, -1 where there are fewer."""
        return self._fetch()[:, self._offset :].astype(np.int32)

    def _fetch(self) -> NDArray[np.int64]:
        """Copy everything that was asked for to the host, at once."""
        if self._host is None:
            assert self._choices is not None, "asked for what was not wanted"
            self._host = self._choices.cpu().numpy()
        return self._host

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row, on the device."""
        return self._logits[row : row + 1]

    def hidden(self, row: int, projection: Projection | None = None) -> NDArray[np.float32] | None:
        """Return float32 [d], the hidden state after the final norm at a row, projected if a projection is given.

        None if it is not known.

        Raises:
            DecodingError: the projection is that of a model with states of another size.
        """
        if self._hidden is None:
            return None
        state = self._hidden[row]
        vector: NDArray[np.float32]
        vector = (state.float() if projection is None else project(projection, state)).cpu().numpy()
        return vector

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return [1, 1, d] of each layer: the hidden states at a row, as `output_hidden_states` gives them."""
        assert self._layers is not None, "asked for what was not wanted"
        if len(self._logits) == 1:
            return self._layers
        return tuple(layer[:, row : row + 1] for layer in self._layers)


def choices(logits: torch.Tensor, wants: Wants) -> torch.Tensor | None:
    """Return int64 [n + 1, any], the most likely token and the candidates of every row, as far as they are wanted.

    The largest of many numbers are looked for in the chunks whose peaks are largest: a maximum without its place takes
    a tenth of the time of one with it, and the whole a quarter of the time of `argmax` and `topk`.

    Args:
        logits: [n + 1, vocabulary].
        wants: what is wanted.
    """
    if logits.dtype == torch.float64:  # plain generate compares as float32, in which more of them are equal
        logits = logits.float()
    size = logits.shape[-1]
    known = min(CANDIDATES, size)
    columns = []
    if size % CHUNK or size < CANDIDATES * CHUNK:
        if wants.best:
            columns.append(logits.argmax(-1, keepdim=True))
        if wants.candidates:
            columns.append(logits.topk(known, -1).indices)
    else:
        chunks = logits.reshape(len(logits), -1, CHUNK)
        peaks = chunks.amax(-1)
        if wants.best:
            places = peaks.argmax(-1, keepdim=True)  # the first of equal peaks, and so on: the lowest id
            columns.append(places * CHUNK + _of_chunks(chunks, places).argmax(-1, keepdim=True))
        if wants.candidates:
            places = peaks.topk(known, -1).indices
            found = _of_chunks(chunks, places).topk(known, -1).indices
            columns.append(places.gather(1, found // CHUNK) * CHUNK + found % CHUNK)
    if wants.candidates and known < CANDIDATES:
        columns.append(columns[-1].new_full((len(logits), CANDIDATES - known), -1))
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else torch.cat(columns, -1)


def _of_chunks(chunks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return some chunks of every row, side by side.

    Args:
        chunks: [rows, chunks, width].
        places: int64 [rows, count].

    Returns:
        [rows, count x width].
    """
    return chunks.gather(1, places[..., None].expand(-1, -1, chunks.shape[2])).flatten(1)


@contextmanager
def last_hidden(model: Any, wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Catch what the model's head is given by this thread: the last hidden states, after the final norm.

    A model is shared: other threads run passes of other texts meanwhile.

    Yields:
        a list that takes [1, rows, d] for every forward pass inside the block; it stays empty if they are not wanted or
        the model has no head of its own.
    """
    caught: list[torch.Tensor] = []
    head = model.get_output_embeddings() if wanted else None
    if head is None:
        yield caught
        return
    thread = get_ident()

    def catch(_head: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if get_ident() == thread:
            caught.append(inputs[0])

    handle = head.register_forward_pre_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def pass_of(outputs: Any, rows: int, wants: Wants, hidden: Sequence[torch.Tensor] = ()) -> Pass:
    """Return the last rows of what a model returned.

    Args:
        outputs: of the model, for one text.
        rows: how many.
        wants: what will be asked for.
        hidden: what `last_hidden` caught.
    """
    return Pass(
        outputs.logits[0, -rows:],
        wants,
        hidden[-1][0, -rows:] if hidden else None,
        outputs.hidden_states if wants.layers else None,
    )
