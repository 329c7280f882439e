"""llama.cpp's lookup decoding, slow and plain: how it reads a static n-gram cache, and what it drafts from that alone.

Read from common/ngram-cache.cpp of llama.cpp at 5c5f166e. Of equally common tokens llama.cpp takes the one that its
hash map gives first; here it is the one that stands first in the file.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Part = Mapping[int, int]
"""Followers of an n-gram with their counts."""
LAX_SUM, LAX_PERCENT = 2, 50
"""What llama.cpp asks of two tokens: occurrences of all followers, and the share of the best."""


def read_cache(path: Path) -> dict[tuple[int, ...], Part]:
    """Read a file as `common_ngram_cache_load` does; what aborts llama.cpp fails an assertion."""
    data, place = path.read_bytes(), 0
    cache: dict[tuple[int, ...], Part] = {}
    while len(data) - place >= 16:
        *ngram, followers = struct.unpack_from("<5i", data, place)
        place += 20
        assert followers > 0
        part: dict[int, int] = {}
        for _ in range(followers):
            token, count = struct.unpack_from("<2i", data, place)
            place += 8
            assert count > 0
            part.setdefault(token, count)
        cache.setdefault(tuple(ngram), part)
    assert place == len(data), "cut short"
    return cache


def from_static(cache: Mapping[tuple[int, ...], Part], last: Sequence[int]) -> int | None:
    """Return what is drafted after two tokens from the static cache alone."""
    part = cache.get((*last, -1, -1), {})
    total = sum(part.values())
    best = max(part, key=lambda token: part[token], default=None)
    if best is None or total < LAX_SUM:
        return None
    assert 100 * total < 2**31, "llama.cpp computes in 32 bits"
    return best if 100 * part[best] >= LAX_PERCENT * total else None
