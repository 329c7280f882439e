import heapq
import struct
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from draftstore.stores.crest.codes import (
    ALPHABETS,
    ESCAPE,
    LEVELS,
    MAX_BITS,
    MAX_BYTES,
    TOKENS,
    fit_codes,
    read_codes,
)

NOTHING = [np.zeros(0, np.int64)] * ALPHABETS


def fitted(alphabet: int, values: list[int]) -> dict[int, str]:
    """Return the code of each symbol of one alphabet, as text of bits."""
    seen = list(NOTHING)
    seen[alphabet] = np.array(values, np.int64)
    writing, _ = read_codes(fit_codes(seen))
    part = slice(writing.starts[alphabet], writing.starts[alphabet + 1])
    rows = zip(
        writing.symbols[part].tolist(), writing.codes[part].tolist(), writing.bits[part].tolist(), strict=True
    )
    return {symbol: f"{code:0{bits}b}" for symbol, code, bits in rows}


def least_bits(weights: list[int]) -> int:
    """Return the bits that the best prefix code takes: the sum of all merged weights."""
    heap, total = sorted(weights), 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        total += both
        heapq.heappush(heap, both)
    return total


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**31 - 1), max_size=200))
def test_codes_are_the_shortest_and_none_begins_another(values: list[int]) -> None:
    codes = fitted(TOKENS, values)
    counts = Counter(values)
    rare = max(1, sum(count == 1 for count in counts.values()))
    assert set(codes) == {*counts, ESCAPE}
    if counts:
        written = sum(len(codes[symbol]) * count for symbol, count in [*counts.items(), (ESCAPE, rare)])
        assert written == least_bits([*counts.values(), rare])
    ordered = sorted(codes.values())
    assert not any(after.startswith(before) for before, after in pairwise(ordered))
    by_length = sorted(codes, key=lambda symbol: (len(codes[symbol]), symbol))
    assert [codes[symbol] for symbol in by_length] == ordered, "canonical: code and length ascend together"


def test_the_rarest_of_very_uneven_symbols_still_fit_32_bits() -> None:
    """Counts that double make a code one bit longer each time."""
    from draftstore.stores.crest.codes import _huffman_bits

    bits = _huffman_bits([1 << place for place in range(45)])
    assert max(bits) <= MAX_BITS
    assert sum(1 << (MAX_BITS - length) for length in bits) <= 1 << MAX_BITS


def test_the_bytes_of_the_file() -> None:
    seen = list(NOTHING)
    seen[LEVELS] = np.array([0, 0, 0, 0, 2, 2, 7], np.int64)
    plain = zstandard.ZstdDecompressor().decompress(fit_codes(seen))
    numbers = struct.pack("<34I", 33, 0, *[1] * 32) + bytes([6] * 4 + [5] * 30)
    none = struct.pack("<IB", 0, 1)
    assert plain == numbers + none * 2 + struct.pack("<4I", 3, 0, 2, 5) + bytes([1, 2, 3, 3])


def packed(*alphabets: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(b"".join(alphabets))


GOOD = struct.pack("<IB", 0, 1)
MANY = struct.pack("<I", 3_000_000) + np.ones(3_000_000, "<u4").tobytes() + b"\x01" * 3_000_001
"""Codes whose table would take 24 GB."""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (packed(GOOD, GOOD, GOOD), "cut off"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<I", 2**32 - 1)), "cut off"),
        (packed(GOOD, GOOD, GOOD, GOOD, b"x"), "too long"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<3I3B", 2, 1, 0, 1, 2, 2)), "symbols do not ascend"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 0, 1)), "a code has no length"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 33, 1)), "a code has no length"),
        (
            packed(GOOD, GOOD, GOOD, struct.pack("<3I3B", 2, 1, 1, 1, 1, 1)),
            "more codes than bits can tell apart",
        ),
        (packed(GOOD, GOOD, GOOD, MANY), "more codes than bits can tell apart"),
        (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60), "too long"),
        (packed(GOOD, GOOD, GOOD, bytes(MAX_BYTES)), "too long"),
        (packed(GOOD)[:4], "content size"),
    ],
)
def test_files_that_hold_no_codes(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_codes(data)
