"""Answers that are done, on disk: a line for every batch, so that a run that was killed goes on after the last one."""

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
        prompt: number of its prompt.
        sample: number of it among the answers to that.
        text: without special tokens.
        tokens: how many were decoded, without what ended it.
        ended: the model ended it, rather than a limit.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    ended: bool


class Journal:
    """Answers by their numbers; a context manager around the file.

    Attributes:
        answers: all that are done.
    """

    def __init__(self, path: Path) -> None:
        """Read what an earlier run left; half a line of it is cut off."""
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
        """Keep the answers of a batch, on disk before this returns.

        Raises:
            OSError: the disk is full, or fails; the next run cuts off what came of it.
        """
        rest = memoryview(json.dumps(answers).encode() + b"\n")
        while rest:
            rest = rest[os.write(self._file, rest) :]
        os.fsync(self._file)
        self._keep(answers)

    def _read(self, path: Path) -> int:
        """Take the answers of a file; return where its last whole line ends."""
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
