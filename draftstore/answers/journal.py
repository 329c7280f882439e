"""A journal of finished answers, one per line, so that a killed run can resume after the last one."""

import json
import os
from pathlib import Path
from typing import NamedTuple


class StoredAnswer(NamedTuple):
    """One answer: its number, text, token count, and whether the model ended it, rather than a limit."""

    number: int
    text: str
    tokens: int
    ended: bool


class Journal:
    """Finished answers by number, in `answers` and in a file."""

    def __init__(self, path: Path) -> None:
        """Read the journal of an earlier run; an incomplete last line is removed."""
        self.answers: dict[int, StoredAnswer] = {}
        self._file = path.open("a+b")
        self._file.seek(0)
        whole = 0
        for line in self._file:
            try:
                answer = StoredAnswer(*json.loads(line[: line.index(b"\n")]))
            except (TypeError, ValueError):
                break
            self.answers[answer.number] = answer
            whole += len(line)
        self._file.truncate(whole)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer, which is on disk on return; after an OSError, the next run removes the partial line."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.answers[answer.number] = answer
