"""Conversations as text: a model's chat template, or the plain role format for models without one.

Templates are untrusted code: they run in jinja2's sandbox, with the globals that transformers provides.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

from draftstore.errors import TokenizerError, needs_extra, type_name

# One turn of a conversation: `role`, `content`, and anything else a chat template reads, such as `tool_calls`.
Message: TypeAlias = Mapping[str, Any]
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
SHAREGPT = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""Roles by the names that ShareGPT and its relatives give them; others stay."""
DOCUMENT_DATE = datetime(2026, 1, 1)
"""The date at which conversations of corpora are rendered: a document's text does not depend on the day of a build."""


def as_messages(value: Sequence[Any], key: str) -> list[Message]:
    """Return a parsed JSON list as a conversation; `key` names it in errors.

    Null and empty keys are dropped. Content is text: a list of text parts is joined, null is empty, and beside tool
    calls it may be absent. Arguments of tool calls that are JSON in a string are parsed, as templates expect them.
    Turns of ShareGPT, `from` and `value`, become `role` and `content`.

    Raises:
        TokenizerError: a message is not an object, or has no role or text.
    """
    return [_as_message(message, f"{key}[{position}]") for position, message in enumerate(value)]


def _as_message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise TokenizerError(f"{place} is {type_name(message)}, expected an object")
    fields = {name: value for name, value in message.items() if value not in (None, "", [])}
    sharegpt = "from" in fields and "role" not in fields
    names = ("from", "value") if sharegpt else ("role", "content")
    role, content, calls = fields.pop(names[0], None), fields.pop(names[1], None), fields.get("tool_calls")
    try:
        content = text_of(content) if calls or names[1] in message else None
    except ValueError as error:
        raise TokenizerError(f"{place}: {error}") from None
    for name, text in zip(names, (role, content), strict=True):
        if not isinstance(text, str):
            raise TokenizerError(f"{place} has no text under {name!r}")
    if isinstance(calls, list):
        fields["tool_calls"] = [_parsed_call(call) for call in calls]
    return {"role": SHAREGPT.get(role, role) if sharegpt else role, "content": content, **fields}


def text_of(content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """Return content as text: null is empty, parts are joined, all else stays; ValueError if one is of another kind."""
    if not isinstance(content, list):
        return "" if content is None else content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)):
            raise ValueError(f"this model reads only text, not {str(part)[:80]}")
    return "".join(part["text"] for part in content)


def _parsed_call(call: Any) -> Any:
    """Return a tool call whose arguments are a JSON value, if they can be read."""
    try:
        arguments = json.loads(call["function"]["arguments"])
        return {**call, "function": {**call["function"], "arguments": arguments}}
    except (LookupError, TypeError, ValueError, RecursionError):
        return call


def plain_chat(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """Return `USER: hi ASSISTANT: hello`, joined by single spaces; a generation prompt is `ASSISTANT:`."""
    turns = [f"{message['role'].upper()}: {message['content']}" for message in messages]
    return " ".join(turns + ["ASSISTANT:"] * add_generation_prompt)


def find_template(config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a tokenizer configuration; if it has several, the one named `default`."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = template.get("default")
    return template if isinstance(template, str) else None


def render_template(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    named_tokens: Mapping[str, str],
    owner: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
    date: datetime | None = None,
) -> str:
    """Render a conversation with a chat template, on a date; None: now."""
    with needs_extra("jinja2"):
        from jinja2 import TemplateError
    # What untrusted template code on unexpected messages can raise.
    unexpected = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        **named_tokens,
        "strftime_now": (date or datetime.now()).strftime,
    }
    if reserved := sorted(variables.keys() & settings.keys()):
        raise TokenizerError(
            f"{reserved[0]!r} is reserved and cannot be a setting of a chat template: omit it"
        )
    try:
        return compile_template(template)({"tools": None, "documents": None, **settings, **variables})
    except (TemplateError, *unexpected) as error:
        raise TokenizerError(f"the chat template of {owner!r} rejects the conversation: {error}") from None


def as_parts(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose texts are lists of one part each."""
    return [{**each, "content": [{"type": "text", "text": each.get("content", "")}]} for each in messages]


def reads_parts(template: str, named_tokens: Mapping[str, str]) -> bool:
    """Return True if a template shows a text only as a list of parts, as those of some image-text models do."""
    shown, probe = [], "some text"
    messages: list[Message] = [{"role": "user", "content": probe}]
    for form in (messages, as_parts(messages)):
        try:
            text = render_template(
                template, form, add_generation_prompt=True, named_tokens=named_tokens, owner="probe"
            )
        except TokenizerError:
            text = ""
        shown.append(probe in text)
    return shown == [False, True]


@cache
def compile_template(template: str) -> Callable[..., str]:
    """Compile a chat template once."""
    with needs_extra("jinja2"):
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks the model's own text for training; rendering passes it through."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's protocol)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template).render
