"""Answers in the format of OpenAI's API, whole and streamed."""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

import draftstore
from draftstore.text.tokenizer import TextTokenizer
from services.worker.jobs import Answered, Delta
from services.worker.work import Facts
from services.worker.writing import Reason, Scored, Usage

FINGERPRINT = f"draftstore-{draftstore.__version__}"
DONE = b"data: [DONE]\n\n"
ALIVE = b": the request waits for its turn\n\n"
"""A comment, which clients ignore, to keep the connection alive."""
IMPOSSIBLE = -9999.0
"""The logarithm of a probability of 0, as OpenAI and vLLM write it."""


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

    def __init__(self, model: str, tokenizer: TextTokenizer) -> None:
        """Format the answer to one request."""
        self._tokenizer = tokenizer
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._model = model

    def whole_reply(
        self, answers: Sequence[Answered], usage: Usage, drafters: Sequence[str]
    ) -> dict[str, Any]:
        """Return all answers."""
        choices = [
            self._choice(self._whole(answer.text), answer.index, answer.reason, answer.scored)
            for answer in answers
        ]
        return self._head(self.whole) | {"choices": choices, "usage": usage.public(drafters)}

    def first(self, index: int) -> list[dict[str, Any]]:  # noqa: ARG002 (chats use it)
        """Return the chunks before the text of an answer."""
        return []

    def delta(self, piece: Delta) -> dict[str, Any]:
        """Return a chunk of an answer."""
        return self._chunk(self._part(piece.text), piece.index, None, piece.scored)

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

    def _chunk(
        self, content: dict[str, Any], index: int, reason: Reason | None, scored: Sequence[Scored] = ()
    ) -> dict[str, Any]:
        return self._head(self.piece) | {"choices": [self._choice(content, index, reason, scored)]}

    def _choice(
        self, content: dict[str, Any], index: int, reason: Reason | None, scored: Sequence[Scored]
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return columns; the most likely tokens include the one that was taken."""
        likelihoods = [each.likelihood for each in scored]
        return {
            "tokens": [self._token(each.token) for each in likelihoods],
            "token_logprobs": [_number(each.logprob) for each in likelihoods],
            "top_logprobs": [
                {
                    self._token(token): _number(value)
                    for token, value in (*each.top, (each.token, each.logprob))
                }
                for each in likelihoods
            ],
            "text_offset": [each.offset for each in scored],
        }

    def _token(self, token: int) -> str:
        """Return the text of a token; a part of a character in visible form."""
        text = self._tokenizer.exact_text(token)
        return self._tokenizer.token_text(token) if text is None else text

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

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any]:
        """Return a list of tokens, each with the most likely ones."""
        return {
            "content": [
                self._scored(each.likelihood.token, each.likelihood.logprob)
                | {"top_logprobs": [self._scored(*pair) for pair in each.likelihood.top]}
                for each in scored
            ],
            "refusal": None,
        }

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.exact_text(token)
        return {
            "token": self._token(token),
            "logprob": _number(logprob),
            "bytes": None if text is None else list(text.encode()),
        }


def _number(logprob: float) -> float:
    """Return a logarithm for JSON, which has no infinity."""
    return max(logprob, IMPOSSIBLE)


def model_entry(facts: Facts, since: int) -> dict[str, Any]:
    """Describe the model as `/v1/models` does."""
    entry = {"id": facts.name, "object": "model", "created": since, "owned_by": "draftstore"}
    return entry | facts.public()
