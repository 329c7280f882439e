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


def as_messages(value: Sequence[Any], key: str) -> list[Message]:
    """Return a parsed JSON list as a conversation; `key` names it in errors.

    Raises:
        TokenizerError: a message is not an object, or its `role` or `content` is not text.
    """
    for position, message in enumerate(value):
        if not isinstance(message, dict):
            raise TokenizerError(f"{key}[{position}] is {type_name(message)}, expected an object")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise TokenizerError(f"{key}[{position}] has no text under {field!r}")
    return list(value)


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
) -> str:
    """Render a conversation with a chat template."""
    with needs_extra("jinja2"):
        from jinja2 import TemplateError
    # What untrusted template code on unexpected messages can raise.
    unexpected = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
    given = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        **named_tokens,
    }
    if settings.get("tools") and "tools" not in template:
        raise TokenizerError(f"the chat template of {owner!r} does not support tools: omit them")
    if taken := sorted(given.keys() & settings.keys()):
        raise TokenizerError(f"{taken[0]!r} is reserved and cannot be a setting of a chat template: omit it")
    try:
        return compile_template(template)({"tools": None, "documents": None, **settings, **given})
    except (TemplateError, *unexpected) as error:
        raise TokenizerError(f"the chat template of {owner!r} rejects the conversation: {error}") from None


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
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render
