"""Texts that no document may contain, stored only as hashes: text that must be forgotten is not kept for searching.

A fragment of L characters is found by a rolling polynomial hash over every L consecutive characters; a digest confirms
the hits. The hashes can confirm a guess of the text, but do not reveal it. All fragments of one length are found in one
pass over a text.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
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


def found_in(fragments: Sequence[Fragment], text: str) -> bool:
    """Return True if a text contains one of the fragments."""
    return bool(fragments) and any(
        _has_one(text.casefold() if folded else text, length, rolls, digests)
        for (length, folded), (rolls, digests) in _grouped(tuple(fragments)).items()
    )


@lru_cache(maxsize=64)
def _grouped(
    fragments: tuple[Fragment, ...],
) -> dict[tuple[int, bool], tuple[NDArray[np.uint64], frozenset[str]]]:
    """Return the hashes and the digests of the fragments of each length, with case and without."""
    groups: dict[tuple[int, bool], list[Fragment]] = {}
    for each in fragments:
        groups.setdefault((each.length, each.folded), []).append(each)
    return {
        key: (np.array([each.roll for each in group], np.uint64), frozenset(each.digest for each in group))
        for key, group in groups.items()
    }


def _has_one(text: str, length: int, rolls: NDArray[np.uint64], digests: frozenset[str]) -> bool:
    """Return True if a text contains a fragment of this length: by its hash, confirmed by its digest."""
    step = max(WINDOW - length + 1, length)
    for start in range(0, len(text) - length + 1, step):
        window = text[start : start + step + length - 1]
        hits = np.flatnonzero(np.isin(_rolls(window, length), rolls)).tolist()
        if any(_digest(window[at : at + length]) in digests for at in hits):
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
