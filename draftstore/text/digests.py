"""The identity of documents: digests of what a source record says, before any template or tokenizer.

    document     the turns with role, content, tool calls and all other keys: which documents a store has
    text         the turns' texts without roles, joined by line feeds: finds a removed document under other roles, too
    answer       the last answer alone: finds it in a live log whose writer did not know the conversation
    beginnings   document and text of each beginning that ends in an answer: later records repeat earlier turns

A plain text has one digest, as document and as text, so that builds show copies of a conversation as plain text. Null
and empty keys do not count. In the text of a turn, tool calls are the same as the model wrote them and as clients
return them. A blank text or answer has no digest, so that it never refuses anything.
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
CALL, CALL_END = "<tool_call>", "</tool_call>"
"""Tags around a tool call in an answer, as Qwen, Hermes and others write it: `{"name": "f", "arguments": {"x": 1}}`."""
JSON = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=str)


class Identity(NamedTuple):
    """The digests of a document, 16 bytes each; see the module."""

    document: bytes
    text: bytes | None
    answer: bytes | None = None
    beginnings: tuple[bytes, ...] = ()


def identify(content: str | Sequence[Mapping[str, Any]]) -> Identity:
    """Return the digests of a plain text, or of a conversation as `as_messages` returns it."""
    if isinstance(content, str):
        digest = _hasher(b"text", _encoded(content)).digest()
        return Identity(digest, digest if content.strip() else None)
    document, text, blank = _hasher(b"document"), _hasher(b"text"), True
    answer, beginnings = "", list[bytes]()
    for place, message in enumerate(content, 1):
        said = _said(message)
        document.update(_turn(message))
        text.update(_encoded(said if place == 1 else "\n" + said))
        blank = blank and not said.strip()
        if message.get("role", "") in QUESTIONERS:
            continue
        answer = said
        if place < len(content) and not blank:
            beginnings += [document.digest(), text.digest()]
    last = answer_digest(answer) if answer.strip() else None
    return Identity(document.digest(), None if blank else text.digest(), last, tuple(beginnings))


def answer_digest(text: str) -> bytes:
    """Return the digest of an answer without its conversation, whatever white space surrounds it."""
    digest: bytes = _hasher(b"answer", _encoded(_said({"content": text}).strip())).digest()
    return digest


def _turn(message: Mapping[str, Any]) -> bytes:
    """Return a turn as it is hashed: the lengths in UTF-8 of role, content and all else, then these."""
    rest = _pruned({key: value for key, value in message.items() if key not in ("role", "content")})
    others = JSON.encode(rest) if rest else ""
    parts = [_encoded(part) for part in (message.get("role", ""), message.get("content") or "", others)]
    return b"%d %d %d\n" % (len(parts[0]), len(parts[1]), len(parts[2])) + b"".join(parts)


def _said(message: Mapping[str, Any]) -> str:
    """Return the text of a turn: its content, then its tool calls, as JSON without their ids."""
    content, given = message.get("content") or "", message.get("tool_calls")
    listed = given if isinstance(given, list | tuple) else ()
    calls = [each.get("function", each) for each in listed if isinstance(each, Mapping)]
    if CALL in content and not calls and (calls := written_calls(content)):
        first, *pieces = content.split(CALL)
        content = first.rstrip() + "".join(piece.partition(CALL_END)[2] for piece in pieces)
    if not calls:
        return content
    return "\n".join(filter(None, (content.rstrip(), JSON.encode(_pruned(calls)))))


def written_calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in an answer, `name` and `arguments`; none if one of them is not JSON with a name."""
    calls = []
    for piece in text.split(CALL)[1:]:
        try:
            call = json.loads(piece.partition(CALL_END)[0])
            calls.append({"name": str(call["name"]), "arguments": call.get("arguments", {})})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return []
    return calls


def _pruned(value: Any) -> Any:
    """Return a JSON value without null and empty keys, which Parquet adds to records that lack them."""
    if isinstance(value, Mapping):
        pruned = {key: _pruned(item) for key, item in value.items()}
        return {key: item for key, item in pruned.items() if item is not None and item not in ("", [], {})}
    return [_pruned(item) for item in value] if isinstance(value, list | tuple) else value


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
