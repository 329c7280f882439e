"""A forward pass: the outputs that it needs, and those that it gives, kept on the device until requested."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from draftstore.recycling.prompts import PromptCandidates

CANDIDATES = 8
"""Number of most likely tokens per row, for drafters."""
CHUNK = 128
"""Logits per chunk in the search for the largest ones; divides nearly all vocabulary sizes."""


class Wants(NamedTuple):
    """The outputs needed of every row besides its logits: most likely token, the 8 most likely, last hidden state."""

    best: bool = True
    candidates: bool = False
    hidden: bool = False

    @classmethod
    def of(cls, wants: Iterable["Wants"]) -> "Wants":
        """Return the outputs that any text of a pass needs."""
        return cls(*map(any, zip(*wants, strict=True)))


class Pass:
    """The outputs of a forward pass over the rows of all its texts, on the device.

    Attributes:
        choices: int64 [rows, any], the most likely token, if requested, and from column `offset` on the candidates.
    """

    def __init__(self, outputs: Any, rows: int, wants: Wants, hidden: Sequence[torch.Tensor] = ()) -> None:
        """Queue the outputs of the last `rows` of each text; `hidden` are the states that `last_hidden` caught."""
        self.logits = outputs.logits[:, -rows:].flatten(0, 1)
        self.hidden = hidden[-1][:, -rows:].flatten(0, 1) if hidden else None
        self.choices, self.offset = choices(self.logits, wants), int(wants.best)

    def fetch(self) -> NDArray[np.int64]:
        """Copy the choices to the host."""
        assert self.choices is not None, "no choices were requested"
        found: NDArray[np.int64] = self.choices.cpu().numpy()
        return found

    def states(self, rows: NDArray[np.int64]) -> NDArray[np.float16] | None:
        """Return float16 [n, d], the last hidden states at rows, int64 [n], of all texts; None if unknown.

        Overflow gives infinity. On a GPU, this waits once, for all rows.
        """
        if self.hidden is None:
            return None
        device = self.hidden.device
        found = self.hidden[torch.from_numpy(rows).to(device, non_blocking=True)].half()
        if device.type == "cuda":
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            host.copy_(found, non_blocking=True)
            torch.cuda.current_stream(device).synchronize()
            found = host
        states: NDArray[np.float16] = found.cpu().numpy()
        return states


Fetch = Callable[[], NDArray[np.int64]]
"""Returns the choices of all texts of a pass, copied once, on first use."""


class Rows(NamedTuple):
    """The outputs of one text: its own n + 1 rows of a pass; invalid after the next one."""

    whole: Pass
    fetch: Fetch
    own: slice

    def best(self) -> list[int]:
        """Return [n + 1], the most likely token at each row; ties in float32 go to the lowest id."""
        found: list[int] = self.fetch()[self.own, 0].tolist()
        return found

    def candidates(self) -> NDArray[np.int32]:
        """Return int32 [n + 1, 8], the most likely tokens at each row, best first, padded with -1."""
        return self.fetch()[self.own, self.whole.offset :].astype(np.int32)

    def logits(self, row: int) -> torch.Tensor:
        """Return [1, vocabulary], the raw logits at a row, on the device."""
        found: torch.Tensor = self.whole.logits[self.own][row : row + 1]
        return found

    def hidden(self, row: int) -> NDArray[np.float16] | None:
        """Return float16 [d], the last hidden state at a row (overflow gives infinity); None if unknown."""
        found = self.whole.states(np.array([self.own.start + row]))
        return None if found is None else found[0]


class BatchRows:
    """The outputs of all texts of a pass, the same number of rows of each; invalid after the next one."""

    def __init__(self, whole: Pass, fetch: Fetch, rows: int, sizes: NDArray[np.int32]) -> None:
        """Hold a pass over `rows` rows of each text, of which n + 1 are its own, n in `sizes`, int32 [texts]."""
        self._whole, self._fetch, self._rows, self._sizes = whole, fetch, rows, sizes
        self._fetched: NDArray[np.int64] | None = None

    def __getitem__(self, text: int) -> Rows:
        """Return the outputs of a text."""
        first = text * self._rows
        return Rows(self._whole, self.fetch, slice(first, first + 1 + int(self._sizes[text])))

    def fetch(self) -> NDArray[np.int64]:
        """Return the choices, copied once."""
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched

    def states(self, texts: Sequence[int], rows: Sequence[int]) -> NDArray[np.float16] | None:
        """Return float16 [n, d], the last hidden states at a row of each of n texts; None if unknown."""
        return self._whole.states(np.array(texts) * self._rows + np.array(rows))

    def best(self) -> NDArray[np.int64]:
        """Return int64 [texts, rows], the most likely token at each row; ties in float32 go to the lowest id."""
        texts = len(self._sizes)
        return self.fetch()[: texts * self._rows, 0].reshape(texts, self._rows)


def choices(logits: torch.Tensor, wants: Wants) -> torch.Tensor | None:
    """Return int64 [n + 1, any], the most likely token and the candidates of every row, as requested.

    The top values are searched only in the chunks with the largest maxima: a maximum without its index takes a tenth of
    the time of one with an index, and the whole search a quarter of the time of `argmax` and `topk`. `logits` are
    [n + 1, vocabulary].
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

    A model is shared: other threads may be running passes of other texts. The list receives [texts, rows, d] for every
    forward pass inside the block; it stays empty if `wanted` is False or the model has no head of its own.
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


def gathering(prompt_candidates: PromptCandidates | None, model: Any) -> AbstractContextManager[None]:
    """Gather prompt candidates, if any are requested; see `PromptCandidates.reading`."""
    return nullcontext() if prompt_candidates is None else prompt_candidates.reading(model, _top_candidates)


def _top_candidates(logits: torch.Tensor) -> torch.Tensor:
    found = choices(logits, Wants(best=False, candidates=True))
    assert found is not None
    return found
