"""llama.cpp's lookup decoding, slow and plain: how it reads a static n-gram cache and what its server drafts.

Read from common/ngram-cache.cpp of llama.cpp at 5c5f166e, and from common/speculative.cpp, common/ngram-map.cpp and
tools/server/server-context.cpp of build 10434. Of two tokens that are half of all each, llama.cpp's hash maps give the
one that came last.
"""

import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Part = Mapping[int, int]
"""Followers of an n-gram with their counts."""
Ngram = tuple[int, ...]
LAX_SUMS, LAX_PERCENTS = (2, 2, 1, 1), (66, 50, 50, 50)
"""What llama.cpp asks of n-grams of one token to four: occurrences of all followers, and the share of the best."""
STATIC = 2
"""Tokens of the n-grams of a static cache."""
MOST = 8
"""Tokens that `ngram-cache` drafts at most."""


class Simple(NamedTuple):
    """How `ngram-simple` drafts: the tokens that it must find again, and those that it drafts at most."""

    match: int = 12
    most: int = 48


def read_cache(path: Path) -> dict[Ngram, Part]:
    """Read a file as `common_ngram_cache_load` does: what aborts llama.cpp fails, up to 15 bytes at the end do not."""
    data, place = path.read_bytes(), 0
    cache: dict[Ngram, Part] = {}
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
    return cache


def _best(part: Part, weights: Part, n: int) -> int | None:
    """Return the follower of an n-gram that weighs most, if it is common enough."""
    best = max(reversed(list(part)), key=lambda token: weights[token], default=None)
    total = sum(part.values())
    if best is None or total < LAX_SUMS[n - 1]:
        return None
    assert 100 * total < 2**31, "llama.cpp computes in 32 bits"
    return best if 100 * part[best] >= LAX_PERCENTS[n - 1] * total else None


def from_static(cache: Mapping[Ngram, Part], last: Sequence[int]) -> int | None:
    """Return what is drafted after two tokens from the static cache alone."""
    part = cache.get((*last, -1, -1), {})
    return _best(part, part, STATIC)


def from_text(text: Sequence[int], simple: Simple) -> list[int]:
    """Return what `ngram-simple` drafts: what followed the last tokens when they stood in the text before."""
    known, pattern = text[:-1], text[-simple.match :]
    if len(known) <= simple.match + simple.most + 1:
        return []
    for start in range(len(known) - simple.match - 1, 0, -1):
        end = start + simple.match
        if known[start:end] == pattern:
            found = list(known[end : end + simple.most])
            return found if len(found) >= simple.match else []
    return []


class Drafts(NamedTuple):
    """What became of the drafts of some answers; passes are those after the one that read the prompt."""

    passes: int
    drafted: int
    accepted: int


class Slot:
    """A slot of a server with `--spec-type ngram-cache`, with all that it has seen since it started.

    Attributes:
        static: a static cache, or an empty one.
        simple: set where the server has `ngram-simple,ngram-cache`.
    """

    def __init__(self, static: Mapping[Ngram, Part], simple: Simple | None = None) -> None:
        self.static, self.simple = static, simple
        self._context: defaultdict[Ngram, Counter[int]] = defaultdict(Counter)
        self._seen = 0

    def _observe(self, text: Sequence[int]) -> None:
        """Count n-grams within what is new; a later text counts only from the length of the longest before on."""
        new = text[self._seen :]
        self._seen = max(self._seen, len(text))
        for n in range(1, 5):
            for place in range(n, len(new)):
                self._context[tuple(new[place - n : place])][new[place]] += 1

    def _next(self, text: Sequence[int]) -> int | None:
        """Return the token that `ngram-cache` drafts after a text."""
        static = self.static.get((*text[-STATIC:], -1, -1), {})
        for n in range(4, 0, -1):
            part = self._context.get(tuple(text[-n:]), Counter())
            weights = {token: count * 100 * static.get(token, 0) or count for token, count in part.items()}
            if (best := _best(part, weights, n)) is not None:
                return best
        return from_static(self.static, text[-STATIC:])

    def draft(self, text: Sequence[int]) -> list[int]:
        """Return the chain that is drafted after a text."""
        if self.simple and (found := from_text(text, self.simple)):
            return found
        self._observe(text)
        chain: list[int] = []
        while len(chain) < MOST and (token := self._next([*text, *chain])) is not None:
            chain.append(token)
        return chain

    def answer(self, prompt: Sequence[int], answer: Sequence[int]) -> Drafts:
        """Draft for an answer that ended because it had as many tokens as were asked for."""
        end, passes, drafted, accepted = 1, 0, 0, 0
        while end < len(answer):
            left = len(answer) - end
            chain = self.draft([*prompt, *answer[:end]])[: left - 1] if left > 1 else []
            right = 0
            while right < len(chain) and chain[right] == answer[end + right]:
                right += 1
            passes, drafted, accepted = passes + 1, drafted + len(chain), accepted + right
            end += right + 1
        return Drafts(passes, drafted, accepted)
