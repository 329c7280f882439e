import struct

import numpy as np
import pytest
import zstandard

from draftstore.stores.crest.codes import (
    ALPHABETS,
    LEVELS,
    MAX_BYTES,
    fit_codes,
    read_codes,
)

NOTHING = [np.zeros(0, np.int64)] * ALPHABETS


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
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 0, 1)), "a code has an invalid length"),
        (packed(GOOD, GOOD, GOOD, struct.pack("<2I2B", 1, 1, 33, 1)), "a code has an invalid length"),
        (
            packed(GOOD, GOOD, GOOD, struct.pack("<3I3B", 2, 1, 1, 1, 1, 1)),
            "more codes than their lengths allow",
        ),
        (packed(GOOD, GOOD, GOOD, MANY), "more codes than their lengths allow"),
        (b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60), "too long"),
        (packed(GOOD, GOOD, GOOD, bytes(MAX_BYTES)), "too long"),
        (packed(GOOD)[:4], "content size"),
    ],
)
def test_files_that_hold_no_codes(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_codes(data)
