"""The visible part of a growing text: stop strings, and tool calls as JSON between tags."""

import json
import secrets
from collections.abc import Sequence
from typing import Any

from draftstore.text.digests import written_calls


class StopStrings:
    """Holds back text that may become a stop string, and ends the text before one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Look for stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self._found = False

    def found(self) -> bool:
        """Return True if a stop string was found."""
        return self._found

    def push(self, text: str) -> str:
        """Append `text`; return what can be shown now."""
        if self._found:
            return ""
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self._found, self._held = True, ""
            return held[: min(places)]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text held back at the end, which did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def parse_calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls in an answer in OpenAI's format; none if one of them is not JSON with a name."""
    return [
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {**call, "arguments": json.dumps(call["arguments"])},
        }
        for call in written_calls(text)
    ]
