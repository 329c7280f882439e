"""llama.cpp's lookup decoding, slow and plain: how it reads a static n-gram cache, and what it drafts.

Read from common/ngram-cache.cpp of llama.cpp at 5c5f166e. Of equally common tokens llama.cpp takes the one that its
hash map gives first; here it is the one that stands first in the file.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.trees.tree import DraftTree

Part = Mapping[int, int]
"""Followers of an n-gram with their counts."""
LONGEST = 4
STATIC = 2
LAX_SUMS, LAX_PERCENTS = (2, 2, 1, 1), (66, 50, 50, 50)


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
    if best is None or total < LAX_SUMS[STATIC - 1]:
        return None
    assert 100 * total < 2**31, "llama.cpp computes in 32 bits"
    return best if 100 * part[best] >= LAX_PERCENTS[STATIC - 1] * total else None


def from_context(context: Mapping[tuple[int, ...], Part], last: Sequence[int], static: Part) -> int | None:
    """Return what is drafted from the text so far, weighed by the static cache."""
    for n in range(min(LONGEST, len(last)), 0, -1):
        part = context.get(tuple(last[-n:]), {})
        total = sum(part.values())
        weights = {
            token: count * 100 * static[token] if token in static else count for token, count in part.items()
        }
        best = max(weights, key=lambda token: weights[token], default=None)
        if best is None or total < LAX_SUMS[n - 1]:
            continue
        if 100 * part[best] >= LAX_PERCENTS[n - 1] * total:
            return best
    return None


class LookupDrafter:
    """Drafts by llama.cpp's rule.

    Attributes:
        static: a static cache.
        context: whether the text itself drafts, too, as it does in llama.cpp.
    """

    def __init__(self, static: Mapping[tuple[int, ...], Part], *, context: bool) -> None:
        self.static, self.context = static, context

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> "LookupSession":
        return LookupSession(self, prompt_ids)


class LookupSession:
    """The drafts of one text."""

    needs_candidates = needs_hidden = False

    def __init__(self, drafter: LookupDrafter, prompt_ids: ArrayLike) -> None:
        self._drafter = drafter
        self._text: list[int] = []
        self._seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self.observe(prompt_ids)

    def observe(self, accepted_ids: ArrayLike, **_ignored: Any) -> None:
        for token in np.asarray(accepted_ids).tolist():
            for n in range(1, min(LONGEST, len(self._text)) + 1) if self._drafter.context else ():
                self._seen[tuple(self._text[-n:])][token] += 1
            self._text.append(token)

    def chain(self, most: int) -> list[int]:
        """Return the tokens that are drafted."""
        text = list(self._text[-LONGEST:])
        begin = len(text)
        while len(text) - begin < most and len(self._text) >= STATIC:
            last = text[-LONGEST:]
            static = self._drafter.static.get((*last[-STATIC:], -1, -1), {})
            token = from_context(self._seen, last, static)
            if token is None:
                token = from_static(self._drafter.static, last[-STATIC:])
            if token is None:
                break
            text.append(token)
        return text[begin:]

    def propose(self, budget: int = 8, min_prob: float = 0.0) -> DraftTree:
        tokens = self.chain(budget)
        parents: NDArray[np.int16] = np.arange(-1, len(tokens) - 1, dtype=np.int16)
        return DraftTree(np.array(tokens, np.int32), parents, np.full(len(tokens), 255, np.uint8))
