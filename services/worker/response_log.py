"""The response log: finished answers as a corpus, so that the next stores are built from the model's own output.

    {"id": "chatcmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "messages": [...the answer last...]}
    {"id": "cmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "text": "the prompt and the answer"}

`draftstore build rest --corpus FILE` reads these lines. They contain prompts and answers of users: the log is off by
default, its files are readable by their owner only, and the oldest half is deleted when it is full.
"""

import fcntl
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftstore.errors import DraftstoreError

LOG = logging.getLogger(__name__)
MAX_WAITING = 64
"""Maximum queued lines; more are dropped."""
MODE = 0o600


class ResponseLog:
    """Appends lines in its own thread, so that no answer waits for the disk or fails with it."""

    def __init__(self, path: Path, most_bytes: int, count: Callable[[str], None] = lambda _: None) -> None:
        """Append to a file, creating it if missing.

        Args:
            path: path of the file; the older file lies beside it, see `older`.
            most_bytes: maximum size of both files together. A file that would exceed half of it replaces the older one.
            count: called with `written`, `dropped` or `failed` for each line.

        Raises:
            DraftstoreError: the file cannot be written.
        """
        self.path = path
        self._most = most_bytes // 2
        self._count = count
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._failing = False
        try:
            with _locked(path):
                pass
        except OSError as error:
            raise DraftstoreError(f"the response log {path} cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._main, name="response-log", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Queue a record; it is dropped if it is longer than the file may be, or the disk is too slow."""
        # Every line feed inside a text is escaped, and no tokenizer emits lone surrogates.
        line = json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
        if len(line) > self._most:
            self._count("dropped")
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._count("dropped")

    def close(self, seconds: float = 5.0) -> None:
        """Write queued records; those not written in time are lost."""
        try:
            self._lines.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _main(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                append(self.path, line, self._most)
            except OSError as error:
                self._count("failed")
                if not self._failing:  # report once, not for every answer
                    LOG.warning(
                        "the response log cannot be written", extra={"error": error.strerror or str(error)}
                    )
                self._failing = True
            else:
                self._count("written")
                self._failing = False


def older(path: Path) -> Path:
    """Return the path of a log's older half: `answers.1.jsonl` beside `answers.jsonl`, in the same format."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def append(path: Path, line: bytes, most: int) -> None:
    """Append a line to a file atomically, even with several processes.

    Args:
        path: path of the file.
        line: line with its line feed.
        most: maximum size; a file that would exceed it is renamed, see `older`, and a new one started.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    with _locked(path) as file:
        if os.fstat(file).st_size + len(line) <= most:
            _write(file, line)
            return
        path.replace(older(path))
        # The lock on the old file keeps others from renaming, and those that wait reopen the new one.
        with _locked(path) as new:
            _write(new, line)


def _write(file: int, line: bytes) -> None:
    """Write a line at the end of a file; a partial write is rolled back."""
    size = os.fstat(file).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        os.ftruncate(file, size)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open a file for appending under an exclusive lock; reopen it if it was renamed during the wait."""
    while True:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Return True if an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
