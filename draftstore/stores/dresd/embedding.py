"""The vectors of a dense store: a model reads the corpus block by block; its states are projected and normalised.

The working directory of a build (draftstore.storage.staging) contains

    states.bin           f16 [entries of the sampled blocks, hidden size]
    projection.bin       the projection fitted to them
    vectors.f16          f16 [entries, dims] in the order of the corpus, NaN where a state is not finite
    layout.json          marker: states.bin and vectors.f16 have their full size
    sampled-00000, ...   marker of each sampled block: its states are in states.bin
    projected.json       marker: projection.bin is written; holds the explained variance
    embedded-00000, ...  marker of each block: its vectors are in vectors.f16

The model reads no block twice: the vectors of sampled blocks are computed from their states in states.bin. A state with
a value beyond the range of float16 counts as not finite. The vectors of a block depend on that block alone, so a
resumed build ends with the same bytes on the same device and with the same batch size, which determines rounding.
"""

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftstore.drafting.projection import Moments, Projection, fit, unit
from draftstore.errors import BuildError
from draftstore.storage.files import map_file, write_at, write_atomic
from draftstore.storage.staging import once
from draftstore.stores.dresd.kernels.passages import Passages

STATES = "states.bin"
PROJECTION = "projection.bin"
VECTORS = "vectors.f16"
LAYOUT = "layout.json"
PROJECTED = "projected.json"
HALF = np.dtype("<f2")
PART = 4096
"""Rows processed at a time."""

Told = Callable[[int, int], None]


class StateSource(Protocol):
    """A model whose states are the keys of a store, such as `draftstore.hf.states.ModelStates`.

    Attributes:
        name: name of the model.
        vocab_size: size of its vocabulary.
        hidden_size: dimensions of a state.
        positions: maximum tokens that it can read at once; None: unlimited.
    """

    name: str
    vocab_size: int
    hidden_size: int
    positions: int | None

    def identity(self) -> dict[str, str]:
        """Return what determines the states besides the texts: `dtype`, `weights`."""

    def states(
        self, texts: Sequence[NDArray[Any]], projection: Projection | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield index and states of each text, float32 [n, hidden_size], or [n, dims] with a projection.

        Equal texts give bit-identical states.
        """


class Reader:
    """Reads the blocks of a corpus with a model."""

    def __init__(
        self, source: StateSource, passages: Passages, tokens: NDArray[Any], bos: tuple[int, ...]
    ) -> None:
        """Prepare the reader.

        Args:
            source: the model.
            passages: passages to read.
            tokens: tokens.bin.
            bos: ids that the model expects before a text.
        """
        self.source = source
        self.passages = passages
        self._tokens = tokens
        self._bos = bos

    def read(
        self, block: int, projection: Projection | None = None
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the states of a block's entries in parts, each with the index of its first entry in the block."""
        texts, rows = self.passages.texts(block, self._tokens, self._bos)
        sizes = np.array([len(text) for text in texts]) - rows
        begins = np.cumsum(sizes) - sizes
        for index, states in self.source.states(texts, projection):
            yield int(begins[index]), states[rows[index] :]


def sampled_blocks(passages: Passages, sample: int) -> list[int]:
    """Return the blocks to fit the projection to: whole, evenly spaced, at least one.

    Args:
        passages: passages to read.
        sample: maximum number of entries if there are several blocks.
    """
    blocks = len(passages.blocks) - 1
    wanted = min(max(sample * blocks // passages.total, 1), blocks)
    return [(2 * number + 1) * blocks // (2 * wanted) for number in range(wanted)]


def make_room(partial: Path, passages: Passages, sampled: Sequence[int], hidden_size: int, dims: int) -> None:
    """Allocate the files of states and vectors once, so that a full disk fails now and not later.

    Raises:
        BuildError: not enough disk space, including the store's.
    """
    layout = {"blocks": passages.entries.tolist(), "sampled": list(sampled)}
    sizes = {
        STATES: passages.entries_of(sampled) * hidden_size * HALF.itemsize,
        VECTORS: passages.total * dims * HALF.itemsize,
    }

    def allocate() -> dict[str, list[int]]:
        for pattern in ("sampled-*", PROJECTED, "embedded-*", STATES, VECTORS):
            for path in partial.glob(pattern):
                path.unlink()
        needed = sum(sizes.values()) + sizes[VECTORS] + passages.total * np.dtype(np.int64).itemsize
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise BuildError(
                f"{partial} needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: make room, or take a "
                "smaller --sample, and run the command again; finished steps are kept"
            )
        for name, size in sizes.items():
            with (partial / name).open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        return layout

    once(partial / LAYOUT, allocate, still=lambda found: bool(found == layout))


def sample_states(partial: Path, reader: Reader, sampled: Sequence[int], told: Told) -> None:
    """Compute and store the states of sampled blocks that are not done yet."""
    passages, size = reader.passages, reader.source.hidden_size
    meter = _Meter(passages, sampled, told)
    place = 0

    def keep_states(block: int, entries: int, place: int) -> None:
        states = np.empty((entries, size), HALF)
        with np.errstate(over="ignore"):  # values beyond float16 are not finite, and counted later
            for first, part in meter.follow(block, reader.read(block)):
                states[first : first + len(part)] = part
        write_at(partial / STATES, states, place * size)

    for block in sampled:
        entries = passages.entries_of([block])
        once(partial / f"sampled-{block:05d}", functools.partial(keep_states, block, entries, place))
        meter.finish(block)
        place += entries


def map_states(partial: Path, hidden_size: int) -> NDArray[np.float16]:
    """Map the states of the sampled blocks: float16 [entries, hidden size]."""
    return map_file(partial / STATES, HALF).reshape(-1, hidden_size)


def fit_projection(partial: Path, hidden_size: int, dims: int, told: Told) -> tuple[Projection, float]:
    """Return the projection fitted to the stored states, and the share of explained variance.

    Raises:
        BuildError: fewer finite states than dimensions.
    """

    def fit_states() -> dict[str, float]:
        states = map_states(partial, hidden_size)
        moments = Moments(hidden_size)
        for start in range(0, len(states), PART):
            told(start, len(states))
            moments.add(states[start : start + PART])
        told(len(states), len(states))
        projection, explained = fit(moments, dims)
        write_atomic(partial / PROJECTION, projection.to_bytes())
        return {"explained_variance": explained}

    explained = once(partial / PROJECTED, fit_states)["explained_variance"]
    return Projection.from_bytes((partial / PROJECTION).read_bytes(), dims), explained


def embed(partial: Path, reader: Reader, sampled: Sequence[int], projection: Projection, told: Told) -> None:
    """Compute the missing vectors of all blocks; the model reads only those without stored states."""
    passages, dims = reader.passages, projection.dims
    kept = {block: passages.entries_of(sampled[:rank]) for rank, block in enumerate(sampled)}
    states = map_states(partial, projection.hidden_size)
    blocks = range(len(passages.blocks) - 1)
    meter = _Meter(passages, blocks, told)

    def keep_vectors(block: int) -> None:
        entries = passages.entries_of([block])
        vectors = np.empty((entries, dims), HALF)
        if block in kept:
            parts = _projected(states[kept[block] : kept[block] + entries], projection)
        else:
            parts = reader.read(block, projection)
        for first, part in meter.follow(block, parts):
            vectors[first : first + len(part)] = _finite_units(part)
        write_at(partial / VECTORS, vectors, int(passages.entries[block]) * dims)

    for block in blocks:
        once(partial / f"embedded-{block:05d}", functools.partial(keep_vectors, block))
        meter.finish(block)


class _Meter:
    """Reports the tokens done in some blocks, also inside a block, which may take minutes."""

    def __init__(self, passages: Passages, blocks: Iterable[int], told: Told) -> None:
        self._passages = passages
        self._told = told
        self._done, self._total = 0, passages.tokens_of(blocks)
        told(self._done, self._total)

    def follow(
        self, block: int, parts: Iterable[tuple[int, NDArray[np.float32]]]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Pass on the parts of a block, reporting its progress after each."""
        size, entries, seen = self._passages.tokens_of([block]), self._passages.entries_of([block]), 0
        for first, part in parts:
            yield first, part
            seen += len(part)
            self._told(self._done + size * seen // entries, self._total)

    def finish(self, block: int) -> None:
        """Count a block as done."""
        self._done += self._passages.tokens_of([block])
        self._told(self._done, self._total)


def _projected(
    states: NDArray[np.float16], projection: Projection
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield stored states as `Reader.read` does."""
    for start in range(0, len(states), PART):
        with np.errstate(invalid="ignore"):
            yield start, projection.apply(states[start : start + PART])


def _finite_units(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise vectors [n, dims]; NaN for zero vectors and those with a value that is not finite."""
    vectors = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, np.float32(np.nan))
    return unit(vectors)
