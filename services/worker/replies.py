"""Answers in the format of OpenAI's API, whole and streamed."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import draftstore
from services.worker.work import Facts
from services.worker.writing import Reason, Usage

FINGERPRINT = f"draftstore-{draftstore.__version__}"
DONE = b"data: [DONE]\n\n"
ALIVE = b": the request waits for its turn\n\n"
"""A comment, which clients ignore, to keep the connection alive."""


def sse(document: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + dumped(document) + b"\n\n"


def dumped(document: dict[str, Any]) -> bytes:
    """Return a document as JSON bytes; lone surrogates are escaped."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


class Completion:
    """The format of `/v1/completions`."""

    endpoint = "completions"
    prefix = "cmpl"
    whole = "text_completion"
    piece = "text_completion"

    def __init__(self, model: str) -> None:
        """Format the answer to one request."""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._model = model

    def answer(self, text: str, reason: Reason, usage: Usage, drafters: Sequence[str]) -> dict[str, Any]:
        """Return the whole answer."""
        head = self._head(self.whole)
        return head | {"choices": [self._whole(text, reason)], "usage": usage.public(drafters)}

    def first(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream."""
        return []

    def delta(self, text: str) -> dict[str, Any]:
        """Return a chunk of the answer."""
        return self._head(self.piece) | {"choices": [self._part(text, None)]}

    def last(self, reason: Reason) -> dict[str, Any]:
        """Return the last chunk of the answer."""
        return self._head(self.piece) | {"choices": [self._part("", reason)]}

    def figures(self, usage: Usage, drafters: Sequence[str]) -> dict[str, Any]:
        """Return the usage chunk, which follows the last one on request."""
        return self._head(self.piece) | {"choices": [], "usage": usage.public(drafters)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
        }

    def _whole(self, text: str, reason: Reason) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}

    def _part(self, text: str, reason: Reason | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


class Chat(Completion):
    """The format of `/v1/chat/completions`."""

    endpoint = "chat"
    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        """Return the chunk with the role."""
        return [self._head(self.piece) | {"choices": [_turn({"role": "assistant", "content": ""}, None)]}]

    def _whole(self, text: str, reason: Reason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}

    def _part(self, text: str, reason: Reason | None) -> dict[str, Any]:
        return _turn({"content": text} if text else {}, reason)


def _turn(delta: dict[str, str], reason: Reason | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


def model_entry(facts: Facts, since: int) -> dict[str, Any]:
    """Describe the model as `/v1/models` does."""
    entry = {"id": facts.name, "object": "model", "created": since, "owned_by": "draftstore"}
    return entry | facts.public()
