r"""n-grams as readable text for SQL: decoded by the tokenizer, without invisible characters.

The bytes of an n-gram's tokens are concatenated and read as UTF-8, so that characters split over several tokens are
whole. Line breaks, control characters, backslashes and incomplete characters appear as in Python's `repr` (`\n`, `\\`,
`\xe2`), as in drawings of trees; spaces stay spaces, so that people can search for what they would type. NUL, which
PostgreSQL's text cannot hold, is `\x00`.
"""

import re
from collections.abc import Iterable, Sequence

import polars as pl

from draftstore.errors import TokenRangeError
from draftstore.text.tokenizer import TextTokenizer

MAX_TEXT_BYTES = 2_500
"""Longer texts end in `…`: an entry of PostgreSQL's index has room for 2,704 bytes."""

_SHOWN = re.compile(r"\\x(..)|\\u(....)|\\U(........)|\\(.)|␣|[^\\␣]+")
_SHORT_ESCAPES = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\"}


class NgramTexts:
    """Converts token ids to texts, millions per second."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        # ASCII is escaped in each piece: its bytes are never a part of another character.
        self._pieces = {
            token: b"".join(map(_ESCAPED.__getitem__, piece_bytes(tokenizer, token)))
            for token in range(tokenizer.vocab_size)
        }

    def render(self, ngrams: Iterable[Sequence[int]]) -> pl.Series:
        """Return the texts of n-grams, given as token ids: String [n-grams].

        Raises:
            TokenRangeError: an id is outside the tokenizer's vocabulary.
        """
        piece = self._pieces.__getitem__
        try:
            return pl.Series([_shown(b"".join(map(piece, ngram))) for ngram in ngrams], dtype=pl.String)
        except KeyError as error:
            raise TokenRangeError(
                f"token id {error}, the tokenizer has {len(self._pieces):,}: the n-grams were not counted with the "
                "tokenizer beside them, count them again"
            ) from None


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


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


_ESCAPED = [_escape(chr(byte)).encode() if byte < 0x80 else bytes([byte]) for byte in range(0x100)]
"""Every byte: ASCII in visible form, others as they are."""


def _shown(data: bytes) -> str:
    """Return bytes with escaped ASCII as text; parts of characters and invisible ones are escaped."""
    text = data.decode(errors="backslashreplace")
    if not text.isprintable():
        text = "".join(each if each.isprintable() else _escape(each) for each in text)
    if len(text) > MAX_TEXT_BYTES // 4 and len(encoded := text.encode()) > MAX_TEXT_BYTES:
        text = encoded[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "…"
    return text
