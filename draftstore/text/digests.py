"""The identity of documents: digests of what a source record says, before any template or tokenizer.

    document     the turns with role, content and tool calls: which documents a store has
    text         the turns' texts without roles, joined by line feeds: finds a removed document under other roles, too
    answer       the last answer as a document of its own: finds it in a live log without the conversation
    beginnings   document and text of each beginning that ends in an answer: later records repeat earlier turns

A plain text is one turn without a role. A blank text or answer has no digest, so that it never refuses anything.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
"""Among 10^12 different documents, two share a digest with probability 10^-15."""
IDENTITY = 2
"""Version of the digests; in version 1, a document was known by its rendered text."""
QUESTIONERS = frozenset({"", "developer", "function", "human", "system", "tool", "user"})
"""Roles whose turns are not answers."""


class Identity(NamedTuple):
    """The digests of a document, 16 bytes each; see the module."""

    document: bytes
    text: bytes | None
    answer: bytes | None = None
    beginnings: tuple[bytes, ...] = ()


def identify(content: str | Sequence[Mapping[str, Any]]) -> Identity:
    """Return the digests of a plain text, or of a conversation as `as_messages` returns it."""
    if isinstance(content, str):
        document, text = (
            _hasher(b"document", _line({"content": content})),
            _hasher(b"text", _encoded(content)),
        )
        return Identity(document.digest(), text.digest() if content.strip() else None)
    document, text = _hasher(b"document"), _hasher(b"text")
    blank, answer, beginnings = True, "", list[bytes]()
    for place, message in enumerate(content, 1):
        said = _said(message)
        document.update(_line({key: message.get(key) for key in ("role", "content", "tool_calls")}))
        text.update(_encoded("\n" * (place > 1) + said))
        blank &= not said.strip()
        if message.get("role", "") in QUESTIONERS:
            continue
        answer = said
        if place < len(content):
            beginnings += [document.digest()] if blank else [document.digest(), text.digest()]
    last = answer_digest(answer) if answer.strip() else None
    return Identity(document.digest(), None if blank else text.digest(), last, tuple(beginnings))


def answer_digest(text: str) -> bytes:
    """Return the digest of an answer as a document of its own, whatever white space surrounds it."""
    return identify(text.strip()).document


def _said(message: Mapping[str, Any]) -> str:
    """Return the text of a turn: its content, then its tool calls as JSON."""
    calls = _pruned(message.get("tool_calls"))
    return "\n".join(filter(None, (message.get("content"), _json(calls) if calls else "")))


def _pruned(value: Any) -> Any:
    """Return a JSON value without null and empty keys, which Parquet adds to records that lack them."""
    if isinstance(value, Mapping):
        pruned = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item is not None and item not in ("", [], {})}
    return [_pruned(item) for item in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    """Return a JSON value on one line, always the same for the same value."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


def _line(turn: Mapping[str, Any]) -> bytes:
    return _encoded(_json(_pruned(turn)) + "\n")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _hasher(tag: bytes, data: bytes = b"") -> Any:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=tag)


def split_digests(data: bytes) -> Iterator[bytes]:
    """Yield the digests that lie one after the other in `data`."""
    return (data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))


def stack_digests(digests: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return digests as uint8 [n, 16]."""
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)


def digest_keys(digests: NDArray[np.uint8]) -> NDArray[np.bytes_]:
    """Return digests, uint8 [n, 16], as S16 [n], which numpy compares, sorts and searches as units."""
    keys: NDArray[Any] = np.ascontiguousarray(digests).view(f"S{DIGEST_BYTES}")
    return keys.reshape(-1)
