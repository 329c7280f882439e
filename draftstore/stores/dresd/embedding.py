"""The vectors of a dense store: a model reads the corpus block by block; its states are projected and normalised.

The working directory of a build (draftstore.storage.staging) contains

    states.bin           f16 [entries of the sampled blocks, hidden size]; sampled.json marks it complete
    projection.bin       the projection fitted to them; projected.json marks it, and holds the explained variance
    vectors.f16          f16 [entries, dims] in corpus order, NaN if a state is not finite; embedded.json marks it

The model reads no block twice: the vectors of sampled blocks are computed from their states in states.bin. A state with
a value beyond the range of float16 counts as not finite. The vectors of a block depend on that block alone, so two
builds give the same bytes on the same device and with the same batch size, which determines rounding.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.storage.files import fsync_path, map_file, remove, write_atomic
from draftstore.storage.report import OnProgress
from draftstore.storage.staging import once, require_space
from draftstore.stores.dresd.kernels.passages import Passages
from draftstore.stores.dresd.projection import Projection, fit, unit

STATES = "states.bin"
PROJECTION = "projection.bin"
VECTORS = "vectors.f16"
HALF = np.dtype("<f2")
PART = 4096
"""Rows processed at a time."""

Parts = Iterator[tuple[int, NDArray[np.float32]]]
"""Rows of a block in parts, each with the index of its first row."""


class StateSource(Protocol):
    """A model whose states are the keys of a store, such as `draftstore.hf.states.ModelStates`.

    It reads at most `positions` tokens at once; None: any number.
    """

    name: str
    vocab_size: int
    hidden_size: int
    positions: int | None

    def identity(self) -> dict[str, str]:
        """Return what determines the states besides the texts: `dtype`, `weights`."""

    def states(self, texts: Sequence[NDArray[Any]], projection: Projection | None = None) -> Parts:
        """Yield index and states of each text, float32 [n, hidden_size], or [n, dims] with a projection.

        Equal texts give bit-identical states.
        """


def sampled_blocks(passages: Passages, sample: int) -> list[int]:
    """Return blocks of about `sample` entries to fit the projection to: whole, evenly spaced, at least one."""
    blocks = len(passages.blocks) - 1
    wanted = min(max(sample * blocks // passages.total, 1), blocks)
    return [(2 * number + 1) * blocks // (2 * wanted) for number in range(wanted)]


@dataclasses.dataclass(frozen=True)
class Embedding:
    """The steps of a build that compute its vectors, in the working directory `partial`.

    `bos` precedes each window of `tokens`, the corpus. The projection to `dims` dimensions is fitted to the states of
    the blocks `sampled`.
    """

    partial: Path
    source: StateSource
    passages: Passages
    tokens: NDArray[Any]
    bos: tuple[int, ...]
    dims: int
    sampled: Sequence[int]

    def sample(self, on_progress: OnProgress) -> None:
        """Write the states of the sampled blocks, if the disk has space for the whole build."""
        size = self.source.hidden_size

        def write() -> None:
            remove(self.partial / STATES)
            states = self.passages.entries_of(self.sampled) * size * HALF.itemsize
            vectors = self.passages.total * self.dims * HALF.itemsize
            require_space(self.partial, states + 2 * vectors + 8 * self.passages.total)
            self._write_blocks(STATES, self.sampled, size, self._read, on_progress)

        once(self.partial / "sampled.json", write)

    def states(self) -> NDArray[np.float16]:
        """Map the states of the sampled blocks: float16 [entries, hidden size]."""
        return map_file(self.partial / STATES, HALF).reshape(-1, self.source.hidden_size)

    def fit(self, on_progress: OnProgress) -> tuple[Projection, float]:
        """Return the projection fitted to the stored states, and the share of explained variance."""

        def write() -> dict[str, float]:
            projection, explained = fit(self.states(), self.dims, on_progress)
            write_atomic(self.partial / PROJECTION, projection.to_bytes())
            return {"explained_variance": explained}

        explained = once(self.partial / "projected.json", write)["explained_variance"]
        return Projection.from_bytes((self.partial / PROJECTION).read_bytes(), self.dims), explained

    def embed(self, projection: Projection, on_progress: OnProgress) -> NDArray[np.float16]:
        """Map the vectors of all blocks, written before; the model reads only blocks without stored states."""
        stored = {
            block: self.passages.entries_of(self.sampled[:rank]) for rank, block in enumerate(self.sampled)
        }
        states = self.states()

        def vectors(block: int) -> Parts:
            if block in stored:
                rows = states[stored[block] : stored[block] + self.passages.entries_of([block])]
                parts = _projected(rows, projection)
            else:
                parts = self._read(block, projection)
            for first, part in parts:
                yield first, _finite_units(part)

        def write() -> None:
            blocks = range(len(self.passages.blocks) - 1)
            self._write_blocks(VECTORS, blocks, self.dims, vectors, on_progress)

        once(self.partial / "embedded.json", write)
        return map_file(self.partial / VECTORS, HALF).reshape(-1, self.dims)

    def _read(self, block: int, projection: Projection | None = None) -> Parts:
        """Yield the states of a block's entries, as the model reads it."""
        texts, rows = self.passages.texts(block, self.tokens, self.bos)
        sizes = np.array([len(text) for text in texts]) - rows
        begins = np.cumsum(sizes) - sizes
        for index, states in self.source.states(texts, projection):
            yield int(begins[index]), states[rows[index] :]

    def _write_blocks(
        self,
        name: str,
        blocks: Sequence[int],
        width: int,
        rows_of: Callable[[int], Parts],
        on_progress: OnProgress,
    ) -> None:
        """Write a row of float16 for each entry of some blocks; report the tokens done, even within a block."""
        done, total = 0, self.passages.tokens_of(blocks)
        on_progress(done, total)
        with (self.partial / name).open("wb") as file:
            for block in blocks:
                tokens, entries, seen = self.passages.tokens_of([block]), self.passages.entries_of([block]), 0
                rows = np.empty((entries, width), HALF)
                for first, part in rows_of(block):
                    with np.errstate(over="ignore"):  # values beyond float16 are not finite; counted later
                        rows[first : first + len(part)] = part
                    seen += len(part)
                    on_progress(done + tokens * seen // entries, total)
                file.write(rows.data)
                done += tokens
        fsync_path(self.partial / name)


def _projected(states: NDArray[np.float16], projection: Projection) -> Parts:
    for start in range(0, len(states), PART):
        with np.errstate(invalid="ignore"):
            yield start, projection.apply(states[start : start + PART])


def _finite_units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise vectors [n, dims]; NaN for zero vectors and those with a value that is not finite."""
    vectors = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, np.float32(np.nan))
    return unit(vectors)
