"""Texts that no document may contain, stored only as hashes: text that must be forgotten is not kept for searching.

A fragment of L characters is found by a rolling polynomial hash over every L consecutive characters; a digest confirms
the hits. The hashes can confirm a guess of the text, but do not reveal it.
"""

import dataclasses
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError
from draftstore.text.digests import text_digest

BASE = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that its powers can be divided out modulo 2**64."""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A text, represented by its length in characters, its polynomial hash and its digest in hexadecimal digits."""

    length: int
    roll: int
    digest: str

    @classmethod
    def of(cls, text: str) -> "Fragment":
        """Return the fragment of a text; CorpusError if the text is empty."""
        if not text:
            raise CorpusError("an empty text is contained in every document: give some characters")
        with np.errstate(over="ignore"):
            sums, _ = _sums(_characters(text))
        return cls(len(text), int(sums[-1]), text_digest(text).hex())

    def occurs_in(self, text: str) -> bool:
        """Return True if a text contains the fragment, exactly as it was spelled."""
        if len(text) < self.length:
            return False
        with np.errstate(over="ignore"):
            sums, powers = _sums(_characters(text))
            starts = len(text) - self.length + 1
            hits = sums[self.length :] - sums[:starts] == np.uint64(self.roll) * powers[:starts]
        found = np.flatnonzero(hits).tolist()
        return any(text_digest(text[at : at + self.length]).hex() == self.digest for at in found)

    @property
    def key(self) -> str:
        """Identity of the fragment, for hashing sets of fragments."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:16]


def _characters(text: str) -> NDArray[np.uint64]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)


def _sums(characters: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the prefix sums of characters times powers of the base, uint64 [n + 1], and the powers [n]."""
    powers: NDArray[Any] = np.full(len(characters), BASE, np.uint64)
    powers[:1] = 1
    powers = np.cumprod(powers, dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(characters * powers, dtype=np.uint64)])
    return sums, powers
