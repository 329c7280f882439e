"""The fields of OpenAI's Responses API, as a chat.

This worker keeps no responses: every request brings its whole conversation.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, Json, model_validator

from draftstore.text.chat import text_of
from services.worker.bodies import ChatBody, Common, Count, Function, Named, Off, Strict, Zero


def _as_text(content: Any) -> Any:
    return text_of(content, ("input_text", "output_text", "text"))


def _unset(value: Any) -> Any:
    if value:
        raise ValueError("this worker keeps no responses: omit it, and send the whole conversation as input")
    return value


def _as_items(value: Any) -> Any:
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list):
        return items
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in items]


Text = Annotated[str, BeforeValidator(_as_text)]
Kept = Annotated[bool, BeforeValidator(_unset)]


class InputMessage(Strict):
    """One turn of a conversation; clients repeat the last four fields of an answer."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    type: Literal["message"]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def turn(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        return {"role": self.role, "content": self.content}


class FunctionCall(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Json[dict[str, Any]]
    id: str | None = None
    status: str | None = None

    def turn(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


class CallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text
    id: str | None = None
    status: str | None = None

    def turn(self) -> dict[str, Any]:
        """Return it as a message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": self.output}


Item: TypeAlias = Annotated[InputMessage | FunctionCall | CallOutput, Field(discriminator="type")]


class FunctionTool(Function):
    """A tool: only functions."""

    type: Literal["function"]


class ChosenTool(Named):
    """The function that an answer must call."""

    type: Literal["function"]


class Format(Strict):
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "Format":
        if (self.schema_ is None) == (self.type == "json_schema"):
            raise ValueError("schema is required by the type json_schema and not allowed with others")
        return self


class TextOptions(Strict):
    """Options of an answer's text."""

    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """No reasoning."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesBody(Common):
    """A conversation to answer."""

    input: Annotated[list[Item], BeforeValidator(_as_items), Field(min_length=1, max_length=4095)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    # only the value that matches the actual behaviour
    store: Kept | None = None
    previous_response_id: Kept | None = None
    conversation: Kept | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    top_logprobs: Zero | None = None
    max_tool_calls: None = None
    prompt: None = None

    def chat(self) -> ChatBody:
        """Return it as a chat."""
        choice = self.tool_choice
        named = {"type": "function", "function": choice} if isinstance(choice, ChosenTool) else choice
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})}
                for tool in self.tools or []
            ],
            "tool_choice": named,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return ChatBody.model_validate(fields | {name: getattr(self, name) for name in Common.model_fields})

    def _messages(self) -> list[dict[str, Any]]:
        turns = list[dict[str, Any]]()
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        for item in self.input:
            turn = item.turn()
            if isinstance(item, FunctionCall) and turns and turns[-1]["role"] == "assistant":
                turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
        return turns

    def _format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None:
            return None
        schema = {"name": wanted.name, "schema": wanted.schema_} if wanted.type == "json_schema" else None
        return {"type": wanted.type, "json_schema": schema}

    def echo(self) -> dict[str, Any]:
        """Return what a response repeats of its request."""
        text = self.text.model_dump(by_alias=True, exclude_none=True) if self.text else {}
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice.model_dump() if isinstance(choice, ChosenTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools or []],
            "top_p": self.top_p,
            "truncation": "disabled",
        }
