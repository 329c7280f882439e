"""The response log: finished answers as a corpus, so that the next build has stores of what the model itself writes.

    {"id": "chatcmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "messages": [...the answer last...]}
    {"id": "cmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "text": "the prompt and the answer"}

`draftstore build rest --corpus FILE` reads these lines. They hold what people asked and were told: the log is off
unless somebody asks for it, its files are for its owner's eyes alone, and the oldest half goes when it is full.
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
MOST_WAITING = 64
"""Lines that wait for a slow disk; more are dropped."""
MODE = 0o600


class ResponseLog:
    """Appends lines in a thread of its own, so that no answer waits for a disk, or fails with it."""

    def __init__(self, path: Path, most_bytes: int, count: Callable[[str], None] = lambda _: None) -> None:
        """Append to a file, which is made where it is missing.

        Args:
            path: of the file; its predecessor lies beside it, see `older`.
            most_bytes: of both files together. When a line would make the first one larger than half of that, it
                takes the place of its predecessor.
            count: is told `written`, `dropped` or `failed` for each line.

        Raises:
            DraftstoreError: the file cannot be written.
        """
        self.path = path
        self._most = most_bytes // 2
        self._count = count
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._failing = False
        try:
            with _locked(path):
                pass
        except OSError as error:
            raise DraftstoreError(f"the response log {path} cannot be written: {error.strerror}") from None
        self._thread = threading.Thread(target=self._main, name="response-log", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Append a record soon; it is dropped where it is longer than the file may be, or the disk too slow."""
        # Every line feed inside a text is escaped, and half a surrogate pair comes from no tokenizer.
        line = json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
        if len(line) > self._most:
            self._count("dropped")
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._count("dropped")

    def close(self, seconds: float = 5.0) -> None:
        """Write what waits; what a disk does not take in this time is lost."""
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
                if not self._failing:  # once, not for every answer
                    LOG.warning(
                        "the response log cannot be written", extra={"error": error.strerror or str(error)}
                    )
                self._failing = True
            else:
                self._count("written")
                self._failing = False


def older(path: Path) -> Path:
    """Return where the older half of a log lies: `answers.1.jsonl` beside `answers.jsonl`, a corpus like it."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def append(path: Path, line: bytes, most: int) -> None:
    """Append a whole line to a file or nothing; several processes may do so at once.

    Args:
        path: of the file.
        line: with its line feed.
        most: bytes of the file; one that would grow beyond is renamed, see `older`, and a new one begun.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    with _locked(path) as file:
        if os.fstat(file).st_size + len(line) <= most:
            _write(file, line)
            return
        path.replace(older(path))
        # While the old file is locked nobody else renames, and the new one is empty for those that wait.
        with _locked(path) as new:
            _write(new, line)


def _write(file: int, line: bytes) -> None:
    """Write a line at the end of a file; what a full disk took of it is taken back.

    Raises:
        OSError: it does not fit.
    """
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
    """Open a file for appending, alone with it; a file that was renamed while we waited is opened anew."""
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
    """Tell whether an open file still lies at a path."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
