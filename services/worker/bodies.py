"""The fields of requests: OpenAI's, and some of vLLM's.

A silently ignored field would give an answer other than the one requested. So undeclared fields are refused, and fields
without effect are declared: with any value, or only with the one that matches the actual behaviour. `null` omits a
field.
"""

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from draftstore.decoding.grammars import ANY_OBJECT, Form
from draftstore.options import worded
from draftstore.text.chat import Message, text_of
from draftstore.trees.frontier import MAX_BUDGET
from services.common.http import ProblemError


def _as_stops(value: Any) -> Any:
    return [value] if isinstance(value, str) and value else value or []


def _off(value: Any) -> Any:
    if value is not False:
        raise ValueError("only false is supported")
    return value


def _as_prompts(value: Any) -> Any:
    return value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]


def _as_calls(value: Any) -> Any:
    """Return calls with parsed arguments, as templates expect them; OpenAI writes these as JSON in a string."""
    try:
        functions = [call["function"] for call in value or []]
        given = [function["arguments"] for function in functions]
        arguments = [json.loads(each) if isinstance(each, str) else each for each in given]
        pairs = zip(functions, arguments, strict=True)
        return [{"type": "function", "function": {**each, "arguments": found}} for each, found in pairs]
    except (LookupError, TypeError, ValueError, RecursionError):
        raise ValueError("expected function calls with arguments in JSON") from None


class Strict(BaseModel):
    """Fields that are checked without conversion; others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


Count = Annotated[int, Field(ge=1, le=1 << 31)]
Limit = Count | Annotated[int, Field(ge=-1, le=-1)]
"""Tokens of an answer; -1: as many as fit into the model's positions and the worker's limit."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Off = Annotated[bool, BeforeValidator(_off)]
"""`Literal[False]` would accept 0, which means something else: the probability of the chosen token."""
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Zero = Annotated[int, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]
Text = Annotated[str, BeforeValidator(text_of)]
Prompt: TypeAlias = str | list[int]


class StreamOptions(Strict):
    """Options of a stream; the last has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ChatMessage(Strict):
    """One turn of a conversation; clients repeat the last five fields of an answer."""

    role: str = Field(min_length=1, max_length=64)
    content: Text = ""
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(_as_calls)] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def message(self) -> Message:
        """Return it in the form of chat templates and corpora."""
        given = {name: value for name, value in self.model_dump().items() if value or name == "content"}
        return given | {"role": "system" if self.role == "developer" else self.role}


class Prediction(Strict):
    """The expected answer, from which drafts are taken."""

    type: Literal["content"]
    content: Text


class Function(Strict):
    """A function that an answer may call; forced calls follow its schema, strict or not."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool: only functions."""

    type: Literal["function"]
    function: Function


class Named(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The function that an answer must call."""

    type: Literal["function"]
    function: Named


class JsonSchema(Strict):
    """A JSON schema; an answer follows it, strict or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError("json_schema is required by the type json_schema and not allowed with others")
        return self


class DraftSettings(Strict):
    """How this answer is drafted."""

    budget: Annotated[int, Field(ge=0, le=MAX_BUDGET)] | None = None
    live: bool = True


class Common(Strict):
    """The fields that requests of all kinds have."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    prediction: Prediction | None = None
    # ours
    draftstore: DraftSettings | None = None
    # without effect, whatever the value
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class Body(Common):
    """The fields of completions and chats."""

    n: Count | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[int, Bias] | None = Field(None, max_length=1024)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=128)]],
        BeforeValidator(_as_stops),
        Field(max_length=16),
    ] = []
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    # without effect, whatever the value
    store: Any = None
    priority: Any = None
    request_id: Any = None
    cache_salt: Any = None
    # only the value that matches the actual behaviour
    best_of: One | None = None

    @property
    def form(self) -> Form | None:
        """What an answer must be; None: any text."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return Form(wanted.json_schema.schema_ if wanted.json_schema else ANY_OBJECT)


class CompletionBody(Body):
    """Texts to continue."""

    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts)]
    logprobs: Off | None = None
    echo: Off | None = None
    suffix: Literal[""] | None = None


class ChatBody(Body):
    """A conversation to answer."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: Off | None = None
    top_logprobs: Zero | None = None
    modalities: list[Literal["text"]] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    moderation: None = None
    reasoning_effort: None = None
    web_search_options: None = None

    @property
    def conversation(self) -> list[Message]:
        """The messages in the form of chat templates and corpora."""
        return [turn.message() for turn in self.messages]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, in the form of chat templates."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]

    @property
    def form(self) -> Form | None:
        """What an answer must be: calls if they are forced, else JSON that is wanted or calls; None: any text."""
        choice, wanted = self.tool_choice, super().form
        named = choice.function.name if isinstance(choice, NamedTool) else None
        forced = choice == "required" or named is not None
        if not forced and (wanted is None or not self.callable_tools):
            return wanted
        functions = [tool.function for tool in self.tools or [] if named in (None, tool.function.name)]
        parallel = self.parallel_tool_calls
        several = named is None and (not forced if parallel is None else parallel)
        schemas = {function.name: function.parameters for function in functions}
        return Form(None if forced or wanted is None else wanted.schema, schemas, several)


AnyBody: TypeAlias = CompletionBody | ChatBody
Parsed = TypeVar("Parsed", bound=BaseModel)


def parse(body: bytes, kind: type[Parsed]) -> Parsed:
    """Parse a request body; raises `ProblemError` if it is not a valid request."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
    place = _place(detail, body)
    where = "".join(f"{str(step)[:100]}." for step in place)[:-1] or "the body"
    code = "unknown_parameter" if detail["type"] == "extra_forbidden" else None
    raise ProblemError(
        400, f"{where}: {worded(detail)}", param=str(place[0])[:100] if place else None, code=code
    )


def _place(problem: Any, body: bytes) -> list[str | int]:
    """Return where a body has a problem: pydantic's path without the names of its own types."""
    place: list[str | int] = []
    here: Any = json.loads(body) if problem["loc"] else None
    for step in problem["loc"]:
        inside = step in here if isinstance(here, dict) else isinstance(here, list) and isinstance(step, int)
        if inside or problem["type"] == "missing":
            place.append(step)
            here = here[step] if inside else None
    return place
