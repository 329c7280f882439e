"""Digests of documents: a document is identified by its text, whatever file and record contain it."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
"""Among 10^12 different texts, two share a digest with probability 10^-15."""


def text_digest(text: str) -> bytes:
    """Return the 16 bytes that identify a document's text: BLAKE2b of its UTF-8."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def stack_digests(digests: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return digests as uint8 [n, 16]."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def digest_keys(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return digests, uint8 [n, 16], as S16 [n], which numpy compares, sorts and searches as units."""
    keys: NDArray[Any] = np.ascontiguousarray(digests).view(f"S{DIGEST_BYTES}")
    return keys.reshape(-1)
