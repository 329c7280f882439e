"""Tools as text, for models whose chat template has none: their functions, calls and results, as Qwen and Hermes do.

The first message describes the functions, the assistant writes calls between tags, and the user returns results:

    <tools>
    {"name": "weather", "description": "...", "parameters": {"type": "object", ...}}
    </tools>

    <tool_call>
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>

    <tool_response>
    sunny
    </tool_response>
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from draftstore.text.digests import CALL, CALL_END

HEAD = """You can call these functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
"""
RULE = f"""
</tools>
To call a function, write its name and its arguments as JSON:
{CALL}
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
{CALL_END}"""


def write_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return a conversation without tools: these, and the calls and results in it, become text."""
    turns: list[Mapping[str, Any]] = []
    for _, group in groupby(messages, lambda message: message.get("role") in ("tool", "user")):
        said = [*group]
        if any(each.get("role") == "tool" for each in said):
            # One turn, since some templates want roles to alternate.
            turns.append({"role": "user", "content": "\n".join(map(_told, said))})
        else:
            turns += map(_without_calls, said)
    if tools and turns:
        described = "\n".join(_dumped(each.get("function", each)) for each in tools)
        first = {**turns[0]}
        parts = [HEAD + described + RULE, first.get("content", "")]
        first["content"] = "\n\n".join(parts[:: -1 if first.get("role") == "system" else 1])
        turns[0] = first
    return turns


def _told(message: Mapping[str, Any]) -> str:
    content = str(message.get("content", ""))
    return f"<tool_response>\n{content}\n</tool_response>" if message.get("role") == "tool" else content


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list):
        return message
    left = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**left, "content": "\n".join(filter(None, [message.get("content"), *map(_written, calls)]))}


def _written(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return f"{CALL}\n{_dumped(function)}\n{CALL_END}"
    before, after = call_parts(function.get("name"))
    return CALL + before + _dumped(function.get("arguments", {})) + after + CALL_END


def call_parts(name: Any) -> tuple[str, str]:
    """Return the text of a call of a function between its tags, before and after its arguments."""
    return f'\n{{"name": {_dumped(name)}, "arguments": ', "}\n"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
