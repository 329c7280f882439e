"""The name of a live store on the command line: `NAME`, `NAME=DIR`, `NAME:TOKENS` or `NAME=DIR:TOKENS`."""

import re
from pathlib import Path
from typing import NamedTuple

from draftstore.errors import DraftstoreError
from draftstore.live.memory import TOKENS
from draftstore.options import NAME

_PATTERN = re.compile(rf"({NAME})(?:=(.+?))?(?::(\d{{1,10}}))?")
LEAST = 1024
"""Tokens of the smallest memory."""


class LiveTarget(NamedTuple):
    """A live store: its name, the folder of its log, if any, and the maximum tokens in memory."""

    name: str
    folder: Path | None = None
    tokens: int = TOKENS

    @classmethod
    def parse(cls, text: str) -> "LiveTarget":
        """Return the live store of an option; DraftstoreError if it is invalid."""
        found = _PATTERN.fullmatch(text)
        if found is None or not LEAST <= int(found[3] or TOKENS) < 2**31:
            raise DraftstoreError(
                f"{text!r} is not a live store: expected NAME, NAME=DIR or NAME=DIR:TOKENS, such as "
                f"team=live/team:{TOKENS}, with at least {LEAST:,} tokens"
            )
        folder = Path(found[2]).expanduser() if found[2] else None
        return cls(found[1], folder, int(found[3] or TOKENS))
