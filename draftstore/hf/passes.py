"""The outputs of a forward pass: logits, most likely tokens, hidden states; kept on the device until requested."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.drafting.projection import Projection
from draftstore.hf.projecting import project

CANDIDATES = 8
"""Most likely tokens per row, for drafters."""
CHUNK = 128
"""Logits per chunk in the search for the largest; divides nearly all vocabulary sizes."""


class Wants(NamedTuple):
    """The outputs needed from a pass besides its logits.

    Attributes:
        best: most likely token of every row.
        candidates: 8 most likely tokens of every row.
        hidden: last hidden state of every row.
        layers: hidden states of every layer.
    """

    best: bool = True
    candidates: bool = False
    hidden: bool = False
    layers: bool = False


class Rows(Protocol):
    """The outputs of a forward pass for one text, n + 1 rows; see `Pass`."""

    def best(self) -> list[int]:
        """Return [n + 1], the most likely token at each row; ties in float32 go to the lowest id."""

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first, filled up with -1."""

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row, on the device."""

    def hidden(self, row: int, projection: Projection | None = None) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state at a row, projected if a projection is given; None if unknown."""

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return [1, 1, d] of each layer: the hidden states at a row, in the form of `output_hidden_states`."""


class Pass:
    """The outputs of a forward pass over some rows, on the device until requested."""

    def __init__(
        self,
        logits: torch.Tensor,
        wants: Wants,
        hidden: torch.Tensor | None = None,
        layers: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Queue the requested outputs.

        Args:
            logits: [rows, vocabulary].
            wants: outputs needed.
            hidden: [rows, d], the last hidden states.
            layers: [1, rows, d] for each layer. A single row returns all of them, as the prefill does in plain
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
        """Return [rows], the most likely token at each row; see `Rows`, as for all that follow."""
        if self._best is None:
            self._best = self._fetch()[:, 0].tolist()
        return self._best

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [rows, 8], the most likely tokens at each row."""
        return self._fetch()[:, self._offset :].astype(np.int32)

    def _fetch(self) -> NDArray[np.int64]:
        """Copy all requested outputs to the host at once."""
        if self._host is None:
            assert self._choices is not None, "asked for what was not wanted"
            self._host = self._choices.cpu().numpy()
        return self._host

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row."""
        return self._logits[row : row + 1]

    def hidden(self, row: int, projection: Projection | None = None) -> NDArray[np.float32] | None:
        """Return float32 [d], the hidden state after the final norm at a row.

        Raises:
            DecodingError: the projection is for another size of states.
        """
        if self._hidden is None:
            return None
        state = self._hidden[row]
        vector: NDArray[np.float32]
        vector = (state.float() if projection is None else project(projection, state)).cpu().numpy()
        return vector

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return [1, 1, d] of each layer: the hidden states at a row."""
        assert self._layers is not None, "asked for what was not wanted"
        if len(self._logits) == 1:
            return self._layers
        return tuple(layer[:, row : row + 1] for layer in self._layers)


class PassPart:
    """The rows of one text in a pass over several, see `Rows`: all share one copy to the host."""

    def __init__(self, whole: Pass, first: int, count: int) -> None:
        """Show `count` rows from `first` on."""
        self._whole, self._first, self._count = whole, first, count

    def best(self) -> list[int]:
        """Return [count], the most likely token at each row."""
        return self._whole.best()[self._first : self._first + self._count]

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [count, 8], the most likely tokens at each row."""
        return self._whole.candidates()[self._first : self._first + self._count]

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row."""
        return self._whole.logits(self._first + row)

    def hidden(self, row: int, projection: Projection | None = None) -> NDArray[np.float32] | None:
        """Return float32 [d], the last hidden state at a row."""
        return self._whole.hidden(self._first + row, projection)

    def layers(self, row: int) -> tuple[torch.Tensor, ...]:
        """Return [1, 1, d] of each layer, of a pass over one text."""
        return self._whole.layers(self._first + row)


def choices(logits: torch.Tensor, wants: Wants) -> torch.Tensor | None:
    """Return int64 [n + 1, any], the most likely token and the candidates of every row, as requested.

    The top values are searched only in the chunks with the largest maxima: a maximum without its index takes a tenth of
    the time of one with it, and the whole a quarter of the time of `argmax` and `topk`.

    Args:
        logits: [n + 1, vocabulary].
        wants: outputs needed.
    """
    if logits.dtype == torch.float64:  # plain generate compares in float32, which has more ties
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
            places = peaks.argmax(-1, keepdim=True)  # the first among ties: the lowest id
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
    """Return chunks [rows, chunks, width] at places [rows, count], side by side, [rows, count x width]."""
    return chunks.gather(1, places[..., None].expand(-1, -1, chunks.shape[2])).flatten(1)


@contextmanager
def last_hidden(model: Any, wanted: bool = True) -> Iterator[list[torch.Tensor]]:
    """Capture the input of the model's head in this thread: the last hidden states, after the final norm.

    A model is shared: other threads may run passes of other texts meanwhile.

    Yields:
        A list that receives [texts, rows, d] for every forward pass inside the block; it stays empty if not wanted or
        if the model has no head of its own.
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
    """Return a model's outputs for the last rows of every text, one text after the other."""
    return Pass(
        outputs.logits[:, -rows:].flatten(0, 1),
        wants,
        hidden[-1][:, -rows:].flatten(0, 1) if hidden else None,
        outputs.hidden_states if wants.layers else None,
    )
