r"""n-grams as readable text for SQL: decoded by the tokenizer, without invisible characters.

The bytes of an n-gram's tokens are concatenated and read as UTF-8, so that characters split over several tokens are
whole. Line breaks, control characters, backslashes and incomplete characters appear as in Python's `repr` (`\n`, `\\`,
`\xe2`), as in drawings of trees; spaces stay spaces, so that people can search for what they would type. NUL, which
PostgreSQL's text cannot hold, is `\x00`.
"""

import re
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from draftstore.errors import TokenRangeError
from draftstore.jit import kernel, read_only
from draftstore.text.tokenizer import TextTokenizer

MAX_TEXT_BYTES = 2_500
"""Longer texts end in `…`: an entry of PostgreSQL's index has room for 2,704 bytes."""

_SHOWN = re.compile(r"\\x(..)|\\u(....)|\\U(........)|\\(.)|␣|[^\\␣]+")
_SHORT_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\"}


class NgramTexts:
    """Converts token ids to texts, millions per second."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        pieces = [piece_bytes(tokenizer, token) for token in range(tokenizer.vocab_size)]
        self._pieces = read_only(np.frombuffer(b"".join(pieces), np.uint8))
        self._offsets = read_only(offsets_of(np.array([len(piece) for piece in pieces], np.int64)))

    def render(self, tokens: NDArray[np.int64], offsets: NDArray[np.int64]) -> pl.Series:
        """Return the texts of n-grams: String [n-grams].

        Args:
            tokens: int64 [any], ids of all n-grams, concatenated.
            offsets: int64 [n-grams + 1], from 0; n-gram i is `tokens[offsets[i]:offsets[i + 1]]`.

        Raises:
            TokenRangeError: an id is outside the tokenizer's vocabulary.
        """
        known = len(self._offsets) - 1
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= known):
            raise TokenRangeError(
                f"token ids from {tokens.min()} to {tokens.max()}, the tokenizer has {known:,}: "
                "the n-grams were not counted with the tokenizer beside them, count them again"
            )
        sizes = np.diff(self._offsets)[tokens]
        raw = np.concatenate(([0], np.cumsum(sizes)))[offsets]
        # An escape has at most 4 characters per byte, and a truncated text the ellipsis.
        longest = int(np.diff(raw).max(initial=0))
        out = np.empty(4 * int(raw[-1]) + 3 * len(offsets), np.uint8)
        ends = np.zeros(len(offsets), np.int64)
        scratch = np.empty(longest, np.uint8)
        _render(
            read_only(tokens),
            read_only(offsets),
            self._pieces,
            self._offsets,
            _printable(),
            scratch,
            out,
            ends,
        )
        texts = pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(ends), pa.py_buffer(out))
        return pl.Series(texts)


def offsets_of(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the start of each run, and the end of the last: int64 [runs + 1]."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def piece_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """Return the bytes that a token adds to a text; for ids without an entry, their visible form."""
    exact = tokenizer.exact_text(token)
    if exact is not None:
        return exact.encode()
    # A part of a character, which has only a visible form.
    return b"".join(_unescaped(match) for match in _SHOWN.finditer(tokenizer.token_text(token)))


def _unescaped(match: re.Match[str]) -> bytes:
    """Return the bytes that an escape in a token's visible form stands for."""
    byte, short_code, long_code, letter = match.groups()
    if byte:
        return bytes([int(byte, 16)])
    if short_code or long_code:
        return chr(int(short_code or long_code, 16)).encode()
    return _SHORT_ESCAPES[letter] if letter else match[0].replace("␣", " ").encode()


@cache
def _printable() -> NDArray[np.bool_]:
    """Return for every code point whether `repr` shows it unescaped, except for the backslash: bool [1114112]."""
    printable = np.fromiter((chr(code).isprintable() for code in range(0x110000)), np.bool_, 0x110000)
    printable[ord("\\")] = False
    return read_only(printable)


@kernel
def _render(
    tokens: Any,
    offsets: Any,
    pieces: Any,
    piece_offsets: Any,
    printable: Any,
    scratch: Any,
    out: Any,
    ends: Any,
) -> None:
    """Write the texts of n-grams into `out`, text i from `ends[i]` to `ends[i + 1]`."""
    at = 0
    for row in range(len(offsets) - 1):
        size = 0
        for i in range(offsets[row], offsets[row + 1]):
            for place in range(piece_offsets[tokens[i]], piece_offsets[tokens[i] + 1]):
                scratch[size] = pieces[place]
                size += 1
        at = _show(scratch, size, printable, out, at)
        ends[row + 1] = at


@kernel
def _show(data: Any, size: Any, printable: Any, out: Any, at: Any) -> Any:
    """Write bytes in visible form at `out[at]`; return the position after them."""
    limit = at + MAX_TEXT_BYTES - 13  # room for one more escape and the ellipsis
    i = 0
    while i < size:
        if at > limit:
            for byte in (0xE2, 0x80, 0xA6):
                out[at] = byte
                at += 1
            break
        width, code = _character(data, i, size)
        if width == 0:
            at = _escape(out, at, data[i], ord("x"), 2)
            i += 1
            continue
        if printable[code]:
            for k in range(width):
                out[at + k] = data[i + k]
            at += width
        elif code == 0x09 or code == 0x0A or code == 0x0D or code == 0x5C:
            out[at] = 0x5C
            out[at + 1] = 0x74 if code == 0x09 else 0x6E if code == 0x0A else 0x72 if code == 0x0D else 0x5C
            at += 2
        elif code < 0x100:
            at = _escape(out, at, code, ord("x"), 2)
        elif code < 0x10000:
            at = _escape(out, at, code, ord("u"), 4)
        else:
            at = _escape(out, at, code, ord("U"), 8)
        i += width
    return at


@kernel
def _escape(out: Any, at: Any, value: Any, letter: Any, digits: Any) -> Any:
    """Write a backslash, a letter and hexadecimal digits; return the position after them."""
    out[at] = 0x5C
    out[at + 1] = letter
    for k in range(digits):
        digit = (value >> (4 * (digits - 1 - k))) & 15
        out[at + 2 + k] = digit + (48 if digit < 10 else 87)
    return at + 2 + digits


@kernel
def _character(data: Any, i: Any, size: Any) -> Any:
    """Return width and code point of the UTF-8 character at `data[i]`; width 0 if it is incomplete."""
    first = np.int64(data[i])
    if first < 0x80:
        return 1, first
    width = 2 if 0xC2 <= first < 0xE0 else 3 if 0xE0 <= first < 0xF0 else 4 if 0xF0 <= first < 0xF5 else 0
    if width == 0 or i + width > size:
        return 0, first
    code = first & (0x7F >> width)
    for k in range(1, width):
        byte = np.int64(data[i + k])
        if byte & 0xC0 != 0x80:
            return 0, first
        code = code << 6 | (byte & 0x3F)
    shortest = 0x80 if width == 2 else 0x800 if width == 3 else 0x10000
    if code < shortest or 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        return 0, first
    return width, code
