"""Vocabulary entries in visible form, for drawings."""

import re
from functools import cache


def visible_piece(piece: str, byte_level: bool) -> str:
    """Return a vocabulary entry as text without blanks, line breaks or control characters."""
    return _visible(_piece_bytes(piece, byte_level).decode("utf-8", errors="surrogateescape"))


def exact_piece(piece: str, byte_level: bool) -> str | None:
    """Return a vocabulary entry as exact text; None if it is only part of a character."""
    try:
        return _piece_bytes(piece, byte_level).decode("utf-8")
    except UnicodeDecodeError:
        return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of the byte-level BPE alphabet."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Return the bytes of a vocabulary entry: byte-level, a byte such as `<0x0A>`, or text with `▁` for spaces."""
    if byte_level:
        alphabet = _byte_alphabet()
        return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in piece)
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _visible(text: str) -> str:
    """Show spaces as `␣` and invisible characters as `repr` does; bytes are given as surrogates."""
    parts = []
    for character in text:
        code = ord(character)
        if character == " ":
            parts.append("␣")
        elif 0xDC80 <= code <= 0xDCFF:
            parts.append(f"\\x{code - 0xDC00:02x}")
        else:
            parts.append(repr(character)[1:-1] if character != "'" else character)
    return "".join(parts)
