"""Tool calls as models write them into an answer: JSON between tags, as Qwen, Hermes and others do."""

import json
from typing import Any

CALL, CALL_END = "<tool_call>", "</tool_call>"
"""Tags around a call: `{"name": "f", "arguments": {"x": 1}}`."""


def written_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in an answer, `name` and `arguments`; none if one of them is not JSON with a name."""
    calls = []
    for piece in text.split(CALL)[1:]:
        try:
            call = json.loads(piece.partition(CALL_END)[0])
            calls.append({"name": str(call["name"]), "arguments": call.get("arguments", {})})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return []
    return calls
