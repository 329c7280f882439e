"""The fields of OpenAI's API, and some of vLLM's, that this worker uses; `services.worker.fields` has the others."""

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from draftstore.text.chat import Message
from draftstore.trees.frontier import MAX_BUDGET
from services.worker.fields import check_fields
from services.worker.problems import ApiError

MAX_STOPS = 16
LONGEST_STOP = 128
"""Characters."""
MAX_MESSAGES = 4096
MAX_STOP_IDS = 256
MAX_TOP = 20
AS_MANY_AS_FIT = -1
"""Tokens of an answer that only the model's positions and the worker limit."""
ROLES = {"developer": "system"}
"""Roles that have another name in templates."""


def _as_stops(value: Any) -> Any:
    """Convert a single stop string to a list of one, and an empty one to none."""
    if value is None or value == "":
        return []
    return [value] if isinstance(value, str) else value


def _as_whole(value: Any) -> Any:
    """Convert a number like 1.0, which some clients write for 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _off_as_none(value: Any) -> Any:
    """Convert `false`, which some clients send for no log-probabilities."""
    return None if value is False else value


def _not_zero(value: int) -> int:
    """Refuse answers without tokens."""
    if not value:
        raise ValueError(f"expected a number greater than 0, or {AS_MANY_AS_FIT} for as many as fit")
    return value


def _as_prompts(value: Any) -> Any:
    """Return prompts, each a text or a list of ids."""
    several = isinstance(value, list) and value and isinstance(value[0], str | list)
    prompts = value if several else [value]
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(item) is int for item in prompt)
        ):
            raise ValueError("expected a text, a list of token ids, or a list of such prompts")
    return prompts


def _as_text(value: Any) -> Any:
    """Return the content of a message, possibly given in parts, as text."""
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
    """Refuse tool calls, whose templates are not supported."""
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


class Prediction(_Strict):
    """What is expected as the answer: drafts are taken from it."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_as_text)]


class Drafting(_Strict):
    """How this answer is drafted."""

    model_config = ConfigDict(extra="forbid")
    budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None


Prompt: TypeAlias = str | list[int]
Whole = Annotated[int, BeforeValidator(_as_whole)]
Count = Annotated[Whole, Field(ge=1, le=1 << 31)]
Top = Annotated[Whole, Field(ge=0, le=MAX_TOP)]
Limit = Annotated[Whole, Field(ge=AS_MANY_AS_FIT, le=1 << 31), AfterValidator(_not_zero)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


class Ask(_Strict):
    """What every request may say.

    `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and `stop_token_ids` are vLLM's, `draftstore` is
    ours.
    """

    model: str | None = None
    n: Count | None = None
    max_tokens: Limit | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(None, max_length=1024)
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[Whole, Field(ge=0)]] | None = Field(None, max_length=MAX_STOP_IDS)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        BeforeValidator(_as_stops),
        Field(max_length=MAX_STOPS),
    ] = []
    prediction: Prediction | None = None
    draftstore: Drafting | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum tokens of an answer; None if the request leaves it open."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage figures."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionAsk(Ask):
    """Texts to go on with."""

    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts)]
    logprobs: Annotated[Top | None, BeforeValidator(_off_as_none)] = None

    @property
    def top(self) -> int | None:
        """Number of most likely tokens that are reported with each token; None: nothing is."""
        return self.logprobs


class ChatAsk(Ask):
    """A conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Limit | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """Number of most likely tokens that are reported with each token; None: nothing is."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Refuse a number of tokens that are not reported."""
        if value and not info.data.get("logprobs"):
            raise ValueError("expected logprobs: true beside it")
        return value

    @property
    def conversation(self) -> list[Message]:
        """The messages in the form of chat templates and corpora."""
        return [{"role": ROLES.get(turn.role, turn.role), "content": turn.content} for turn in self.messages]

    @property
    def wanted_tokens(self) -> int | None:
        """Maximum tokens of an answer."""
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
    check_fields(document, kind.model_fields)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _problem(error) from None


def _problem(error: ValidationError) -> ApiError:
    """Return the first validation error."""
    detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = detail["loc"]
    where = ".".join(str(step)[:100] for step in place)
    message = detail["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{where}: {message}", param=str(place[0]) if place else None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
