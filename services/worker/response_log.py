"""The response log: finished answers as a corpus, so that the next stores are built from the model's own output.

    {"id": "chatcmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "messages": [...the answer last...]}
    {"id": "cmpl-5f...", "created": "2026-01-01T12:00:00Z", "model": "m", "text": "the prompt and the answer"}

`draftstore build rest --corpus FILE` reads these lines. They contain prompts and answers of users: the log is off by
default, its files are readable by their owner only, and the oldest half is deleted when it is full.
"""

import errno
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from draftstore.errors import DraftstoreError
from draftstore.storage.locks import hold

LOG = logging.getLogger(__name__)
MAX_WAITING = 64
"""Maximum queued lines; more are dropped."""
MODE = 0o600


class ResponseLog:
    """Appends lines in its own thread, so that no answer waits for the disk or fails with it."""

    def __init__(self, path: Path, most_bytes: int, count: Callable[[str], None] = lambda _: None) -> None:
        """Append to a file, which no other worker may write.

        A file that would exceed half of `most_bytes` replaces the older one, see `older`. `count` is called with
        `written`, `dropped` or `failed` for each line.
        """
        self._path, self._most, self._count = path, most_bytes // 2, count
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        try:
            self._file = _open(path)
        except OSError as error:
            raise DraftstoreError(f"the response log {path} cannot be written: {error.strerror}") from None
        files, words = [str(path), str(older(path))], "anyone who can read them can read users' requests"
        LOG.warning(f"prompts and answers are kept: {words}", extra={"files": files, "bytes": most_bytes})
        self._thread = threading.Thread(target=self._main, name="response-log", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line; it is dropped if it is longer than the file may be, or the disk is too slow."""
        if len(line) <= self._most:
            with suppress(queue.Full):
                self._lines.put_nowait(line)
                return
        self._count("dropped")

    def close(self, seconds: float = 5.0) -> None:
        """Write queued records; those not written in time are lost."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _main(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                LOG.warning("the response log cannot be written", extra={"error": str(error)})
                self._count("failed")
            else:
                self._count("written")
        os.close(self._file)

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._file).st_size
        if size + len(line) > self._most:
            with suppress(FileNotFoundError):  # the last new one could not be created
                self._path.replace(older(self._path))
            full, self._file, size = self._file, _open(self._path), 0
            os.close(full)
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, size)
            raise OSError("the disk is full")


def as_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of the log; lone surrogates, which only clients send, become question marks."""
    return json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"


def older(path: Path) -> Path:
    """Return the path of a log's older half: `answers.1.jsonl` beside `answers.jsonl`, in the same format."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _open(path: Path) -> int:
    """Open a regular file for appending, under a lock that excludes other workers."""
    if path.exists() and not path.is_file():  # a pipe would wait for its reader
        raise OSError(errno.EINVAL, "expected a regular file")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, MODE)
    try:
        hold(file, seconds=0)
    except OSError:
        os.close(file)
        raise
    return file
