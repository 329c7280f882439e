"""Shingles: the n-grams of token ids of removed texts as 64-bit hashes, to prove later that no store holds them.

A shingle is 4 to 8 tokens in a row. The text cannot be read from the hashes. But who has them, and knows how a text
begins, can try what follows: the file is for its owner only, and is to be removed when all is proven.

    N.npz      n4 .. n8: u64, the hashes of each length, ascending; counts: texts, and those of fewer than 4 tokens

Of very much text a sample is kept: the hashes that begin with so many zeros that they fit.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError
from draftstore.storage.files import replacing
from draftstore.text.encoding import PIECE_CHARACTERS, split_text
from draftstore.text.records import Document
from draftstore.text.tokenizer import TextTokenizer

LENGTHS = (4, 5, 6, 7, 8)
"""Shorter ones can be found by trying all; longer ones hold those of 8 tokens."""
BASE = np.uint64(0xD6E8FEB86659FD93)
MODE = 0o600
FILTER_BITS = 22
BATCH = 256
MOST = 1 << 23
"""Most hashes of each length."""

Hashes = NDArray[np.uint64]


def shingle_hashes(tokens: NDArray[Any], vocab_size: int) -> Iterator[tuple[int, Hashes, NDArray[np.bool_]]]:
    """Yield each length with the hashes at every place, uint64 [n - length + 1], and where they are of one document.

    Args:
        tokens: ids of any unsigned type, [n]; those from `vocab_size` on end a document.
        vocab_size: ids lie below.
    """
    mixed, whole = _mixed(tokens.astype(np.uint64)), tokens < vocab_size
    hashes, inside = np.zeros(len(tokens), np.uint64), np.ones(len(tokens), np.bool_)
    for length in range(1, min(LENGTHS[-1], len(tokens)) + 1):
        size = len(tokens) - length + 1
        hashes = hashes[:size] * BASE + mixed[length - 1 :]
        inside = inside[:size] & whole[length - 1 :]
        if length in LENGTHS:
            yield length, _mixed(hashes), inside


def _mixed(numbers: Hashes) -> Hashes:
    """Return numbers with their bits mixed, by the finalizer of splitmix64."""
    mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def encode_texts(documents: Iterable[Document], tokenizer: TextTokenizer) -> Iterator[NDArray[np.int32]]:
    """Yield the ids of documents, cut into pieces as builds cut them."""
    batch: list[str] = []
    ends: list[int] = []

    def encoded() -> Iterator[NDArray[np.int32]]:
        pieces, start = tokenizer.encode_documents(batch), 0
        for end in ends:
            yield np.concatenate(pieces[start:end])
            start = end

    for document in documents:
        batch += [piece for piece, _ in split_text(document.text, PIECE_CHARACTERS)]
        ends.append(len(batch))
        if len(batch) >= BATCH:
            yield from encoded()
            batch, ends = [], []
    yield from encoded()


@dataclasses.dataclass(frozen=True)
class Shingles:
    """Sets of hashes by length, each ascending.

    Attributes:
        hashes: uint64 [any] for each of `LENGTHS`.
        texts: number of texts that they are of.
        short: number of those with fewer than 4 tokens, of which there are none.
    """

    hashes: dict[int, Hashes]
    texts: int = 0
    short: int = 0

    @classmethod
    def of(cls, texts: Iterable[NDArray[np.int32]]) -> "Shingles":
        """Return the shingles of texts as token ids."""
        sets = {length: _Sample() for length in LENGTHS}
        count = short = 0
        for ids in texts:
            count += 1
            short += len(ids) < LENGTHS[0]
            for length, hashes, _ in shingle_hashes(ids.astype(np.uint32), 1 << 32):
                sets[length].add(hashes)
        return cls({length: sample.settled() for length, sample in sets.items()}, count, short)

    def joined(self, other: "Shingles") -> "Shingles":
        """Return the shingles of both."""
        hashes = {length: np.union1d(self.hashes[length], other.hashes[length]) for length in LENGTHS}
        return Shingles(hashes, self.texts + other.texts, self.short + other.short)

    @property
    def size(self) -> int:
        """Number of hashes."""
        return sum(map(len, self.hashes.values()))

    def save(self, path: Path) -> None:
        """Write the file atomically, readable by its owner only."""
        arrays: dict[str, Any] = {f"n{length}": self.hashes[length] for length in LENGTHS}
        with replacing(path, MODE) as filling, filling.open("wb") as file:
            np.savez(file, counts=np.array([self.texts, self.short]), **arrays)

    @classmethod
    def load(cls, path: Path) -> "Shingles":
        """Read the file.

        Raises:
            CorpusError: it is missing or damaged.
        """
        try:
            with np.load(path) as file:
                texts, short = file["counts"].tolist()
                return cls({length: file[f"n{length}"] for length in LENGTHS}, texts, short)
        except (OSError, KeyError, ValueError, EOFError) as error:
            raise CorpusError(f"{path} cannot be read ({error}): nothing can be proven without it") from None


class _Sample:
    """Distinct hashes; above the most, those below a limit that halves."""

    def __init__(self) -> None:
        self._parts: list[Hashes] = []
        self._size = 0
        self._limit = np.uint64((1 << 64) - 1)

    def add(self, hashes: Hashes) -> None:
        self._parts.append(hashes[hashes <= self._limit])
        self._size += len(self._parts[-1])
        if self._size > 2 * MOST:
            self.settled()

    def settled(self) -> Hashes:
        """Return the hashes, ascending."""
        hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *self._parts]))
        while len(hashes) > MOST:
            self._limit //= np.uint64(2)
            hashes = hashes[hashes <= self._limit]
        self._parts, self._size = [hashes], len(hashes)
        return hashes


class Finder:
    """Finds shingles of a set among many."""

    def __init__(self, shingles: Shingles) -> None:
        """Look for `shingles`."""
        self._hashes = shingles.hashes
        self._filters = {length: _filter(hashes) for length, hashes in shingles.hashes.items()}

    def find(self, tokens: NDArray[Any], vocab_size: int) -> Iterator[tuple[int, Hashes, NDArray[np.intp]]]:
        """Yield each length with the hashes of the set that occur in tokens, each once, and where first.

        Args:
            tokens: ids of any unsigned type, [n]; those from `vocab_size` on end a document.
            vocab_size: ids lie below.
        """
        for length, hashes, inside in shingle_hashes(tokens, vocab_size):
            places = np.flatnonzero(self._filters[length][_low(hashes)] & inside)
            places = places[np.isin(hashes[places], self._hashes[length])]
            found, first = np.unique(hashes[places], return_index=True)
            if len(found):
                yield length, found, places[first]


def _low(hashes: Hashes) -> NDArray[np.intp]:
    return (hashes & np.uint64((1 << FILTER_BITS) - 1)).astype(np.intp)


def _filter(hashes: Hashes) -> NDArray[np.bool_]:
    """Return which low bits occur: most hashes of a store are out at once."""
    bits = np.zeros(1 << FILTER_BITS, np.bool_)
    bits[_low(hashes)] = True
    return bits
