"""The subset of OpenAI's API requests that this worker supports.

Unknown parameters are ignored, since OpenAI's clients send more every year. Known parameters that would change an
answer in an unsupported way are refused: see `UNSUPPORTED`.
"""

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from draftstore.text.chat import Message
from services.worker.problems import ApiError

MOST_STOPS = 16
LONGEST_STOP = 128
"""Characters."""
MOST_MESSAGES = 4096
ROLES = {"developer": "system"}
"""Roles that have another name in templates."""

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), "a request gets one answer: send it several times for more"),
    "best_of": ((None, 1), "a request gets one answer: send it several times for more"),
    "logprobs": ((None, False), "the probabilities of tokens are not returned"),
    "top_logprobs": ((None, 0), "the probabilities of tokens are not returned"),
    "echo": ((None, False), "the prompt is not repeated"),
    "suffix": ((None, ""), "text is only added at the end"),
    "tools": ((None, []), "tools are not called"),
    "tool_choice": ((None, "none", "auto"), "tools are not called"),
    "functions": ((None, []), "functions are not called"),
    "function_call": ((None, "none", "auto"), "functions are not called"),
    "response_format": ((None, {"type": "text"}), "the format of the text is not enforced"),
    "modalities": ((None, ["text"]), "the model writes only text"),
    "audio": ((None,), "the model writes only text"),
}
"""By parameter: values without effect, and why others are refused."""


def _as_stops(value: Any) -> Any:
    """Convert a single stop string to a list of one."""
    return [] if value is None else [value] if isinstance(value, str) else value


def _as_prompt(value: Any) -> Any:
    """Return the prompt: a text, or a list of ids.

    Raises:
        ValueError: there are several prompts, or none.
    """
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"expected one prompt in a request, found {len(value)}: send several requests")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise ValueError("expected a text, or a list of token ids")


def _as_text(value: Any) -> Any:
    """Return the content of a message, possibly given in parts, as text.

    Raises:
        ValueError: a part is not text.
    """
    if value is None:
        return ""
    if not isinstance(value, list):
        return value
    for part in value:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"a part of the type {str(kind)[:40]!r}: this model reads only text")
    return "".join(part["text"] for part in value)


def _no_calls(value: Any) -> Any:
    """Refuse tool calls, whose templates are not supported.

    Raises:
        ValueError: there are tool calls.
    """
    if value:
        raise ValueError("tools are not called")
    return None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """How a stream should be."""

    include_usage: bool | None = None


class ChatMessage(_Strict):
    """One turn of a conversation."""

    role: str = Field(min_length=1, max_length=64)
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    tool_calls: Annotated[None, BeforeValidator(_no_calls)] = None
    function_call: Annotated[None, BeforeValidator(_no_calls)] = None


Count = Annotated[int, Field(ge=1, le=1 << 31)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


class Ask(_Strict):
    """What every request may say. `top_k`, `min_p` and `repetition_penalty` are not OpenAI's, but common."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        BeforeValidator(_as_stops),
        Field(max_length=MOST_STOPS),
    ] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage figures."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionAsk(Ask):
    """A text to go on with."""

    prompt: Annotated[str | list[int], BeforeValidator(_as_prompt)]

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum tokens of the answer."""
        return self.max_tokens


class ChatAsk(Ask):
    """A conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Count | None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages in the form of chat templates and corpora."""
        return [{"role": ROLES.get(turn.role, turn.role), "content": turn.content} for turn in self.messages]

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Parsed = TypeVar("Parsed", bound=Ask)


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Parse a request body.

    Raises:
        ApiError: the body is not JSON, or not a valid request.
    """
    try:
        document = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "expected a JSON object")
    _check_supported(document)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _problem(error) from None


def _check_supported(document: dict[str, Any]) -> None:
    """Refuse known but unsupported parameters.

    Raises:
        ApiError: there is such a parameter.
    """
    for name, (harmless, reason) in UNSUPPORTED.items():
        value = document.get(name)
        if not any(type(value) is type(other) and value == other for other in harmless):
            raise ApiError(400, f"{name} is not supported with this value: {reason}", param=name)


def _problem(error: ValidationError) -> ApiError:
    """Return the first validation error."""
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = detail["loc"]
    where = ".".join(str(step)[:100] for step in place)
    message = detail["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}", param=str(place[0]) if place else None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
