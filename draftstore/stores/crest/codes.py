"""Prefix codes for the contents of entries: fitted to the entries of a build, stored beside them, read as tables.

There are four alphabets: bit lengths of numbers, tokens, parents plus one, and differences of levels. Each has a
canonical Huffman code: rarer symbols have longer codes, and the lengths alone determine the codes. Symbols without a
code are written as ESCAPE and a number; all bit lengths, 0 to 32, have a code.

The file is a zstandard frame with a checksum. It holds, for each alphabet, little-endian:

    0    u32         number of symbols, n
    4    u32 [n]     the symbols, ascending, each as the difference from the previous one; without ESCAPE
    ..   u8 [n + 1]  lengths of their codes in bits, 1 to 32; last, that of ESCAPE

`draftstore.stores.crest.coding` describes an entry. A tree takes some 130 bytes, half of its binary format.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from draftstore.errors import StoreError
from draftstore.search.cutting import Trees
from draftstore.stores.crest.coding import (
    ALPHABETS,
    ESCAPE,
    HEAD,
    HEAD_BITS,
    MAX_BITS,
    MAX_COUNT,
    NUMBERS,
    PADDING,
    RANKED,
    ROW,
    Writing,
    code_entries,
    read_entries,
)

ENTRIES_VERSION = 2
"""Version of entries and codes."""
MAX_BYTES = 1 << 24
_LEVEL = 19


def fit_codes(trees: Trees) -> bytes:
    """Return the file of the codes that write the entries of trees in the fewest bits."""
    nodes = np.arange(trees.tokens.shape[1]) < trees.sizes[:, None]
    numbers = np.minimum(np.concatenate([trees.counts, trees.distinct, trees.sizes]), MAX_COUNT)
    _, bit_lengths = np.frexp(numbers.astype(np.float64))
    levels = np.diff(trees.levels.astype(np.int64), axis=1, prepend=0)
    parts = []
    for alphabet, values in enumerate(
        (bit_lengths, trees.tokens[nodes], trees.parents[nodes] + 1, levels[nodes])
    ):
        symbols, counts = np.unique(values, return_counts=True)
        rare = max(1, int(np.count_nonzero(counts == 1)))  # estimates the unseen ones (Good-Turing)
        if alphabet == NUMBERS:
            symbols, rare = np.arange(MAX_BITS + 1), 1
            counts = 1 + np.bincount(values, minlength=MAX_BITS + 1)
        bits = _huffman_bits([*counts.tolist(), rare])
        steps = np.diff(symbols, prepend=0).astype("<u4")
        parts += [np.array([len(symbols)], "<u4").tobytes(), steps.tobytes(), bytes(bits)]
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(b"".join(parts))


def _huffman_bits(weights: Sequence[int]) -> list[int]:
    """Return the length of each symbol's code, 1 to MAX_BITS."""
    while True:
        parents = [0] * (2 * len(weights) - 1)
        heap = [(weight, place) for place, weight in enumerate(weights)]
        heapq.heapify(heap)
        for new in range(len(weights), len(parents)):
            (light, one), (heavy, other) = heapq.heappop(heap), heapq.heappop(heap)
            parents[one] = parents[other] = new
            heapq.heappush(heap, (light + heavy, new))
        depths = [0] * len(parents)
        for place in range(len(parents) - 2, -1, -1):
            depths[place] = depths[parents[place]] + 1
        if max(depths) <= MAX_BITS:
            return depths[: len(weights)] if len(weights) > 1 else [1]
        weights = [(weight + 1) // 2 for weight in weights]  # flatter weights give a shallower tree


def read_codes(data: bytes) -> tuple[Writing, NDArray[np.int64]]:
    """Return the tables for writing and reading from the file of codes.

    The table for reading is one array, which is faster to pass to a kernel than four. It holds, for all alphabets:

        HEADS     [4, 2048], by the next 11 bits: the symbol and length of the code that they begin with, as
                  symbol * 64 + length; 0: the code is longer
        LIMITS    [4, 33], exclusive upper bound of the next 32 bits if the code has at most this many bits
        FIRSTS    [4, 33], added to a code of this many bits, gives the place of its symbol in this array
        RANKED    the symbols, sorted by alphabet, length of their code and symbol

    Damaged codes raise a ValueError.
    """
    try:
        # decompressing allocates as much as the frame declares
        if not 0 <= zstandard.frame_content_size(data) <= MAX_BYTES:
            raise ValueError("too long")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    symbols, bits, place = [], [], 0
    for _ in range(ALPHABETS):
        count = int.from_bytes(plain[place : place + 4], "little")
        middle, end = place + 4 + 4 * count, place + 5 + 5 * count
        if end > len(plain):
            raise ValueError("cut off")
        steps = np.frombuffer(plain[place + 4 : middle], "<u4").astype(np.int64)
        if not steps[1:].all() or steps.sum() >= ESCAPE:
            raise ValueError("symbols do not ascend")
        symbols.append(np.append(np.cumsum(steps), ESCAPE))
        bits.append(np.frombuffer(plain[middle:end], np.uint8).astype(np.int64))
        place = end
    if place != len(plain):
        raise ValueError("too long")
    return _tables(symbols, bits)


def _tables(
    symbols: Sequence[NDArray[np.int64]], bits: Sequence[NDArray[np.int64]]
) -> tuple[Writing, NDArray[np.int64]]:
    """Assign the codes: those of equal length count up; longer ones continue where they ended."""
    starts = np.cumsum([0, *map(len, symbols)])
    codes, ranked = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], np.int64)
    heads = np.zeros((ALPHABETS, HEAD), np.int64)
    limits, firsts = np.zeros((ALPHABETS, ROW), np.int64), np.zeros((ALPHABETS, ROW), np.int64)
    for alphabet in range(ALPHABETS):
        start, lengths = starts[alphabet], bits[alphabet]
        if lengths.min() < 1 or lengths.max() > MAX_BITS:
            raise ValueError("a code has an invalid length")
        if np.sum(1 << (MAX_BITS - lengths)) > 1 << MAX_BITS:
            raise ValueError("more codes than their lengths allow")
        order = np.argsort(lengths, kind="stable")
        ranked[start : starts[alphabet + 1]] = symbols[alphabet][order]
        short = order[: np.count_nonzero(lengths <= HEAD_BITS)]
        found = np.repeat(symbols[alphabet][short] * 64 + lengths[short], 1 << (HEAD_BITS - lengths[short]))
        heads[alphabet, : len(found)] = found
        code = place = 0
        for length, count in enumerate(np.bincount(lengths, minlength=MAX_BITS + 1).tolist()):
            code *= 2
            firsts[alphabet, length] = RANKED + start + place - code
            codes[start + order[place : place + count]] = np.arange(code, code + count)
            code, place = code + count, place + count
            limits[alphabet, length] = code << (MAX_BITS - length)
    writing = Writing(starts, np.concatenate(symbols), codes, np.concatenate(bits))
    return writing, np.concatenate([heads.ravel(), limits.ravel(), firsts.ravel(), ranked])


class EntryCodec:
    """Encodes and decodes the entries of one store by its file of codes; StoreError if these or an entry are damaged.

    Threads may share it.
    """

    def __init__(self, codes: bytes) -> None:
        try:
            self._writing, self._reading = read_codes(codes)
        except ValueError as error:
            raise StoreError(f"the dictionary of the store is damaged ({error}): build it again") from None

    def encode(self, trees: Trees) -> list[bytes]:
        """Return the entry of each tree."""
        data, ends = code_entries(self._writing, *trees)
        encoded = data.tobytes()
        return [encoded[start:end] for start, end in pairwise([0, *ends.tolist()])]

    def decode(
        self, entries: Sequence[bytes], rows: NDArray[np.int64], batch: int, most: int, max_level: int
    ) -> tuple[NDArray[Any], ...]:
        """Decode entries into rows of a batch; see `draftstore.stores.crest.coding.read_entries`."""
        ends = np.fromiter(accumulate(map(len, entries)), np.int64, len(entries))
        padding = bytes(PADDING + -int(ends[-1] if len(ends) else 0) % 4)
        coded = np.frombuffer(b"".join([*entries, padding]), np.uint32).byteswap()
        problem, *found = read_entries(self._reading, coded, ends, rows, batch, most, max_level)
        if problem:
            raise StoreError(
                f"an entry cannot be read (error code {problem} of the tree codec): the store is damaged, build it "
                "again"
            )
        return tuple(found)


_NO_TREES = Trees(
    np.empty((0, 0), np.int32),
    np.empty((0, 0), np.int16),
    np.empty((0, 0), np.uint8),
    *np.zeros((3, 0), np.int64),
)
UNFITTED = fit_codes(_NO_TREES)
"""Codes fitted to nothing."""
