"""Replies in the format of OpenAI's Responses API: a message and calls of functions, whole or as events."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.http import ProblemError
from services.worker.answers import Answered, Delta, Facts, Usage
from services.worker.replies import Completion, problem_document
from services.worker.responses_body import ResponsesBody


class Responses(Completion):
    """The format of `/v1/responses`; its state is that of one stream."""

    prefix = "resp"
    done = b""
    params: Mapping[str, str] = {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"
    }  # fmt: skip

    def __init__(self, facts: Facts, body: ResponsesBody) -> None:
        super().__init__(facts)
        self._head = {
            "id": self.id, "object": "response", "created_at": self._created, "model": facts.name,
            "error": None, "incomplete_details": None, **body.echo(),
        }  # fmt: skip
        self._number = 0  # of the next event
        self._item_id = f"msg_{secrets.token_hex(12)}"
        self._is_open = False  # whether the message has begun
        self._output: list[dict[str, Any]] = []
        self._reason = "stop"

    def reply(self, answers: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return the response."""
        for answer in answers:
            self.last(answer)
        [ended] = self.closing(usage, False)
        response: dict[str, Any] = ended["response"]
        return response

    def opening(self, _choices: int) -> list[dict[str, Any]]:
        """Return the events of a response that begins."""
        begun = {"response": self._response("in_progress")}
        return [self._event("response.created", **begun), self._event("response.in_progress", **begun)]

    def delta(self, piece: Delta) -> list[dict[str, Any]]:
        """Return the events of a piece of the message, which begins with the first."""
        return [
            *self._begin_text(),
            self._of_text("response.output_text.delta", delta=piece.text, logprobs=[]),
        ]

    def last(self, answer: Answered) -> list[dict[str, Any]]:
        """Return the events of the end of the message, and of the calls."""
        events, self._reason = list[dict[str, Any]](), answer.reason
        if answer.content or not answer.calls:
            events += self._begin_text()
            item = self._text_item(answer.content, _status(answer.reason))
            events.append(self._of_text("response.output_text.done", text=answer.content, logprobs=[]))
            events.append(self._of_text("response.content_part.done", part=item["content"][0]))
            events.append(self._of_item("response.output_item.done", item))
            self._output.append(item)
        for call in answer.calls:
            events += self._called(_call_item(call))
        return events

    def closing(self, usage: Usage, _wanted: bool) -> list[dict[str, Any]]:
        """Return the event of the whole response."""
        status, details = _status(self._reason), {"reason": "max_output_tokens"}
        more = {"usage": _usage(usage), "incomplete_details": details if status == "incomplete" else None}
        return [self._event(f"response.{status}", response=self._response(status) | more)]

    def failure(self, error: ProblemError) -> list[dict[str, Any]]:
        """Return the event of an error."""
        found = problem_document(error)["error"]
        reason = {"code": "server_error", "message": found["message"]}
        failed = self._response("failed") | {"error": reason}
        return [self._event("response.failed", response=failed)]

    def _begin_text(self) -> list[dict[str, Any]]:
        if self._is_open:
            return []
        self._is_open = True
        item = self._text_item("", "in_progress")
        part, item["content"] = item["content"][0], []
        added = self._of_item("response.output_item.added", item)
        return [added, self._of_text("response.content_part.added", part=part)]

    def _called(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        begun = item | {"arguments": "", "status": "in_progress"}
        kind = "response.function_call_arguments"
        events = [
            self._of_item("response.output_item.added", begun),
            self._event(f"{kind}.delta", delta=item["arguments"], **place),
            self._event(f"{kind}.done", arguments=item["arguments"], name=item["name"], **place),
            self._of_item("response.output_item.done", item),
        ]
        self._output.append(item)
        return events

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **content}

    def _of_item(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._output), item=item)

    def _of_text(self, kind: str, **content: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **content)

    def _text_item(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {
            "id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": [part]
        }  # fmt: skip

    def _response(self, status: str) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [*self._output], "usage": None}


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed"}
    return {**head, "call_id": call["id"], **call["function"]}


def _usage(usage: Usage) -> dict[str, Any]:
    figures = usage.public()["usage"]
    return {
        "input_tokens": figures["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": figures["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": figures["total_tokens"],
        "draftstore": figures["draftstore"],
    }
