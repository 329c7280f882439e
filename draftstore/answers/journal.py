"""A journal of finished answers: one line per batch, so that a killed run resumes after the last one."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias

Item: TypeAlias = tuple[int, int]
"""Number of a prompt, and of one of its answers."""


class StoredAnswer(NamedTuple):
    """One answer.

    Attributes:
        prompt: number of the prompt.
        sample: number of the answer among those to the prompt.
        text: text without special tokens.
        tokens: number of decoded tokens, without the end token.
        ended: whether the model ended it, rather than a limit.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    ended: bool


class Journal:
    """Finished answers by number; a context manager around the file.

    Attributes:
        answers: all finished answers.
    """

    def __init__(self, path: Path) -> None:
        """Read the journal of an earlier run; an incomplete last line is cut off."""
        self.answers: dict[Item, StoredAnswer] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, self._read(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def add(self, answers: Sequence[StoredAnswer]) -> None:
        """Append the answers of a batch; they are on disk when this returns.

        Raises:
            OSError: the disk is full or fails; the next run cuts off the partial line.
        """
        rest = memoryview(json.dumps(answers).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fsync(self._file)
        self._keep(answers)

    def _read(self, path: Path) -> int:
        """Read a file's answers; return the end of its last complete line."""
        whole = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    answers = [StoredAnswer(*fields) for fields in json.loads(line)]
                except (ValueError, TypeError):
                    break
                if not line.endswith(b"\n"):
                    break
                self._keep(answers)
                whole += len(line)
        return whole

    def _keep(self, answers: Sequence[StoredAnswer]) -> None:
        self.answers.update({(answer.prompt, answer.sample): answer for answer in answers})
