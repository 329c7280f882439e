"""Answers in the format of OpenAI's API, whole and streamed."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import draftstore
from services.worker.jobs import Answered, Delta
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

    def whole_reply(
        self, answers: Sequence[Answered], usage: Usage, drafters: Sequence[str]
    ) -> dict[str, Any]:
        """Return all answers."""
        choices = [self._choice(self._whole(answer.text), answer.index, answer.reason) for answer in answers]
        return self._head(self.whole) | {"choices": choices, "usage": usage.public(drafters)}

    def first(self, index: int) -> list[dict[str, Any]]:  # noqa: ARG002 (chats use it)
        """Return the chunks before the text of an answer."""
        return []

    def delta(self, piece: Delta) -> dict[str, Any]:
        """Return a chunk of an answer."""
        return self._chunk(self._part(piece.text), piece.index, None)

    def last(self, answer: Answered) -> dict[str, Any]:
        """Return the last chunk of an answer."""
        return self._chunk(self._part(""), answer.index, answer.reason)

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

    def _chunk(self, content: dict[str, Any], index: int, reason: Reason | None) -> dict[str, Any]:
        return self._head(self.piece) | {"choices": [self._choice(content, index, reason)]}

    def _choice(self, content: dict[str, Any], index: int, reason: Reason | None) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}


class Chat(Completion):
    """The format of `/v1/chat/completions`."""

    endpoint = "chat"
    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def first(self, index: int) -> list[dict[str, Any]]:
        """Return the chunk with the role."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}}, index, None)]

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def model_entry(facts: Facts, since: int) -> dict[str, Any]:
    """Describe the model as `/v1/models` does."""
    entry = {"id": facts.name, "object": "model", "created": since, "owned_by": "draftstore"}
    return entry | facts.public()
