"""Texts that no document may contain, stored only as hashes: text that must be forgotten is not kept for searching.

A fragment of L characters is found by a rolling polynomial hash over every L consecutive characters; a digest confirms
the hits. The hashes can confirm a guess of the text, but do not reveal it. All fragments of one length are found in one
pass over a text.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError

BASE = 0x9E3779B97F4A7C15
"""Odd, so that its powers can be divided out modulo 2**64."""
INVERSE = pow(BASE, -1, 1 << 64)
WINDOW = 1 << 16
"""Characters that are hashed at a time: a long text needs no more memory than a short one."""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A text, represented by its length in characters, its polynomial hash and its digest in hexadecimal digits.

    A `folded` one is compared without case: length and hashes are those of the case-folded text.
    """

    length: int
    roll: int
    digest: str
    folded: bool = False

    @classmethod
    def of(cls, text: str, *, ignore_case: bool = False) -> "Fragment":
        """Return the fragment of a text; CorpusError if the text is empty."""
        if not text:
            raise CorpusError("an empty text is contained in every document: give some characters")
        text = text.casefold() if ignore_case else text
        return cls(len(text), int(_rolls(text, len(text))[0]), _digest(text), ignore_case)


class Finder:
    """Whether a text contains a fragment; the time depends on how many lengths they have, not on their number."""

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        groups: dict[tuple[int, bool], list[Fragment]] = {}
        for each in fragments:
            groups.setdefault((each.length, each.folded), []).append(each)
        self._groups = [_Group(*key, found) for key, found in groups.items()]

    def __call__(self, text: str) -> bool:
        """Return True if a text contains one of the fragments."""
        return any(group.occurs_in(text) for group in self._groups)


class _Group:
    """The hashes of fragments of one length, and a table of their upper 16 bits."""

    def __init__(self, length: int, folded: bool, fragments: Sequence[Fragment]) -> None:
        self._length, self._folded = length, folded
        self._rolls = np.array([each.roll for each in fragments], np.uint64)
        self._digests = frozenset(each.digest for each in fragments)
        self._table = np.zeros(1 << 16, np.bool_)
        self._table[self._rolls >> np.uint64(48)] = True

    def occurs_in(self, text: str) -> bool:
        text, length = text.casefold() if self._folded else text, self._length
        step = max(WINDOW - length + 1, length)
        for start in range(0, len(text) - length + 1, step):
            window = text[start : start + step + length - 1]
            rolls = _rolls(window, length)
            hits = np.flatnonzero(self._table[(rolls >> np.uint64(48)).astype(np.uint16)])
            hits = hits[np.isin(rolls[hits], self._rolls)] if len(hits) else hits
            if any(_digest(window[at : at + length]) in self._digests for at in hits.tolist()):
                return True
        return False


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _rolls(text: str, length: int) -> NDArray[np.uint64]:
    """Return the hash of every `length` consecutive characters, uint64 [n - length + 1]."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    count = len(characters)
    powers, inverse = (_powers(base, max(WINDOW, 1 << (count - 1).bit_length())) for base in (BASE, INVERSE))
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum(characters * powers[:count], out=sums[1:])
    return (sums[length:] - sums[: count + 1 - length]) * inverse[: count + 1 - length]


@lru_cache(maxsize=4)
def _powers(base: int, count: int) -> NDArray[np.uint64]:
    """Return the powers 0, 1, ... of a base modulo 2**64, uint64 [count]."""
    powers: NDArray[Any] = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)
