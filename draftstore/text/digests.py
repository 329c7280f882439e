"""The identity of a document: a digest of its text, by which builds know what is new, what is gone, and duplicates."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
"""Two of 10^12 different texts share a digest with probability 10^-15."""


class TextDigest:
    """The digest of one text, given piece by piece."""

    def __init__(self) -> None:
        """Start with the empty text."""
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def add(self, piece: str) -> None:
        """Append a piece of the text."""
        self._hash.update(piece.encode("utf-8", "surrogatepass"))

    def finish(self) -> bytes:
        """Return the digest, 16 bytes."""
        return self._hash.digest()


def text_digest(text: str) -> bytes:
    """Return the digest of a text, 16 bytes: BLAKE2b of its UTF-8."""
    digest = TextDigest()
    digest.add(text)
    return digest.finish()


def as_keys(digests: NDArray[np.uint8]) -> NDArray[Any]:
    """Return digests, uint8 [n, 16], as one value each, [n]: they can be sorted, searched and compared."""
    return np.ascontiguousarray(digests).view(f"V{DIGEST_BYTES}").reshape(-1)
