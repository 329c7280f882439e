r"""n-grams as readable text for SQL.

n-grams are decoded by the tokenizer, which gives `�` for parts of characters. Line breaks, control characters and
backslashes appear as in Python's `repr` (`\n`, `\\`), and NUL, which PostgreSQL's text cannot hold, is `\x00`. Spaces
stay spaces, so that users can search for what they would type.
"""

from collections.abc import Sequence

import polars as pl

from draftstore.errors import TokenRangeError
from draftstore.text.tokenizer import TextTokenizer

MAX_TEXT_BYTES = 2_500
"""Longer texts end in `…`: an index entry of PostgreSQL has room for 2,704 bytes."""


def ngram_texts(tokenizer: TextTokenizer, ngrams: Sequence[Sequence[int]]) -> pl.Series:
    """Return the texts of n-grams of token ids, String [n-grams]; TokenRangeError if an id is not of the vocabulary."""
    highest = max(map(max, filter(None, ngrams)), default=0)
    if highest >= tokenizer.vocab_size:
        raise TokenRangeError(
            f"token id {highest}, but the tokenizer has {tokenizer.vocab_size:,}: the n-grams were not counted with "
            "the tokenizer beside them, count them again"
        )
    return pl.Series(map(_shown, tokenizer.decode_within(ngrams)), dtype=pl.String)


def _shown(text: str) -> str:
    """Return a text with escapes for invisible characters and backslashes, truncated if it is too long."""
    text = text.replace("\\", r"\\")
    if not text.isprintable():
        text = "".join(
            each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
        )
    if len(text) > MAX_TEXT_BYTES // 4 and len(encoded := text.encode()) > MAX_TEXT_BYTES:
        text = encoded[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "…"
    return text
