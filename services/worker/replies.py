"""Answers in the format of OpenAI's API, whole and streamed."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import draftstore
from services.worker.answers import Answered, Delta, Usage
from services.worker.engine import Facts

NO_STORE = {"Cache-Control": "no-store"}
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

    prefix = "cmpl"
    whole = piece = "text_completion"

    def __init__(self, facts: Facts) -> None:
        """Format the answers of a model to one request."""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._facts = facts
        self._created = int(time.time())

    def reply(self, answers: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return all answers."""
        ordered = sorted(answers, key=lambda answer: answer.choice)
        choices = [_choice(each.choice, self._message(each), each.reason) for each in ordered]
        return self._document(self.whole, choices, usage)

    def first(self, choice: int) -> list[dict[str, Any]]:  # noqa: ARG002 (chats use it)
        """Return the chunks before the text of an answer."""
        return []

    def delta(self, piece: Delta) -> dict[str, Any]:
        """Return a chunk of an answer."""
        return self._chunk(piece.choice, {"text": piece.text})

    def last(self, answer: Answered) -> dict[str, Any]:
        """Return the last chunk of an answer."""
        return self._chunk(answer.choice, {"text": ""}, answer.reason)

    def figures(self, usage: Usage) -> dict[str, Any]:
        """Return the usage chunk, which follows the last one on request."""
        return self._document(self.piece, [], usage)

    def _message(self, answer: Answered) -> dict[str, Any]:
        return {"text": answer.content}

    def _chunk(self, choice: int, content: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return self._document(self.piece, [_choice(choice, content, reason)])

    def _document(self, kind: str, choices: Sequence[Any], usage: Usage | None = None) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._facts.name}
        figures = usage.public() if usage else {}
        return {**head, "system_fingerprint": FINGERPRINT, "choices": choices, **figures}


class Chat(Completion):
    """The format of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def first(self, choice: int) -> list[dict[str, Any]]:
        """Return the chunk with the role."""
        return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})]

    def delta(self, piece: Delta) -> dict[str, Any]:
        """Return a chunk of an answer."""
        return self._chunk(piece.choice, {"delta": {"content": piece.text}})

    def last(self, answer: Answered) -> dict[str, Any]:
        """Return the last chunk of an answer, with the calls of tools."""
        calls = [{"index": index, **call} for index, call in enumerate(answer.calls)]
        return self._chunk(answer.choice, {"delta": {"tool_calls": calls} if calls else {}}, answer.reason)

    def _message(self, answer: Answered) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.content, "refusal": None}
        calls = {"content": answer.content or None, "tool_calls": answer.calls} if answer.calls else {}
        return {"message": {**message, **calls}}


def _choice(choice: int, content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": choice, **content, "logprobs": None, "finish_reason": reason}
