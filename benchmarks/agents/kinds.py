"""Kinds of agent output by token: thoughts, shell commands, file edits, JSON of tool calls, answers.

A reply is read as text. Text from `<tool_call>` to `</tool_call>` is JSON; text from the first line ```` ```bash ````
to the end is a command, or an edit if the command writes a file (`EDIT`). Text around them is a thought, as is a reply
that begins with THOUGHT and was truncated before its command; other replies without either are answers to the user. A
token has the kind of its first character.
"""

import re

import numpy as np
from numpy.typing import NDArray

from draftstore.text.tokenizer import TextTokenizer

KINDS = ("thought", "command", "edit", "JSON", "answer")
EDIT = re.compile(
    r"\bsed\s+(-\w+\s+)*-i|\bcat\s*(<<|>)|\btee\s|\bgit apply\b|\bpatch\s+-"
    r"|\.write(_text|lines)?\(|open\([^)]*['\"][wa]"
)
_SPANS = re.compile(
    r"(?P<JSON><tool_call>.*?(</tool_call>|\Z))|(?P<command>^```bash$.*)", re.DOTALL | re.MULTILINE
)


def kinds_of(output: NDArray[np.int32], tokenizer: TextTokenizer) -> NDArray[np.int8]:
    """Return the kind of each token of a reply as an index into `KINDS`: int8 [n] for int32 [n]."""
    ids = output.tolist()
    text = tokenizer.decode(ids)
    starts = np.array([len(tokenizer.decode(ids[:i])) for i in range(len(ids))])
    found = list(_SPANS.finditer(text))
    kinds = np.full(
        len(ids), KINDS.index("thought" if found or text.startswith("THOUGHT") else "answer"), np.int8
    )
    for span in found:
        name = "edit" if span["command"] and EDIT.search(span["command"]) else str(span.lastgroup)
        kinds[(starts >= span.start()) & (starts < span.end())] = KINDS.index(name)
    return kinds
