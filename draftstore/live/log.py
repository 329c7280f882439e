"""The log of a live store: its documents on disk, in segments that are each appended to by one process.

    live.json                  the vocabulary, the limit of the log, and the version of the digests
    0001767225600000-9f3a.live a segment: consecutive records; its process holds its lock
    0001767225600000-9f3a.rest a segment at rest: published, so out of memory, but still a source of the collection
    removed.json               take-downs and the state of their last change: see `draftstore.live.removing`
    tokenizer/                 the tokenizer, if a collection reads the log

The name of a segment begins with its creation in Unix milliseconds; if the clock was set back, with the latest time in
the log. A record is a header, with the document's digest and a hash of its prompt, and token ids, i32. Readers skip
what is damaged or partial, up to the next record with a valid checksum. Removed documents are overwritten in place,
their digests too. Only their owner can read the segments: they contain user data.
"""

import hashlib
import logging
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftstore.errors import DraftstoreError
from draftstore.live.shared import MODE, change, enlarge, settings_of
from draftstore.storage.locks import hold, lock
from draftstore.text.digests import DIGEST_BYTES

LOG = logging.getLogger(__name__)
PROMPT_END = 8
"""Tokens of a prompt kept before its answer: the turn markers of chat templates, and a little more."""
MAX_DOCUMENT = 1 << 16
"""Maximum tokens that a client appends of a document; the last ones are kept."""
LIVE, REST = ".live", ".rest"
SEGMENT_SECONDS = 3600.0
"""Age at which a segment is closed; a nightly rebuild removes all but the last hour from memory."""
BEAT_SECONDS = 1.0
LOGGED = 64
"""Maximum bytes of a log per byte of the ids that its largest memory has room for."""
_HEAD = struct.Struct(f"<IBBHIId{DIGEST_BYTES}sQI")
"""CRC-32 of the rest, kind, origin of the digest, 0, tokens, tokens of the prompt, Unix seconds, digest, hash of the
prompt, version."""
_DOCUMENT, _ERASED, _APPLIED = range(3)
_UNKNOWN, _RECORD, _ANSWER = range(3)
_TOKEN = np.dtype("<i4")


class LiveDocument(NamedTuple):
    """A document of a live store: ids, int32 [any], of which the first `prompt_size` are the end of the prompt.

    `digest` are 16 bytes that identify it (`draftstore.text.digests`), none if unknown. It is that of the answer's text
    `alone` if the writer did not know the conversation. `created` is in Unix seconds; 0: now. `prompt` is the hash of
    the whole prompt (`hash_prompt`), 0 if unknown; `version` that of the model that answered, 0: the newest one known.
    """

    ids: NDArray[np.int32]
    prompt_size: int = 0
    digest: bytes = b""
    alone: bool = False
    created: float = 0.0
    prompt: int = 0
    version: int = 0

    @classmethod
    def of(
        cls,
        prompt: NDArray[np.integer],
        output: ArrayLike,
        digest: bytes = b"",
        version: int = 0,
        asked: int | None = None,
    ) -> "LiveDocument":
        """Return the document of an answer, with the end of its prompt, so that its first tokens can be drafted.

        If the beginning of the answer follows the prompt, the latter has `asked` ids.
        """
        end = np.asarray(prompt[max(0, len(prompt) - PROMPT_END) :], np.int32)
        ids = np.concatenate([end, np.asarray(output, np.int32)])
        return cls(ids, len(end), digest, prompt=hash_prompt(prompt[:asked]), version=version)


def hash_prompt(ids: NDArray[np.integer]) -> int:
    """Return 64 bits by which answers to the same prompt, int [any], are found; never 0."""
    digest = hashlib.blake2b(ids.astype(_TOKEN, copy=False).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def answers_of(
    prompt: NDArray[np.integer], answers: Iterable[ArrayLike], version: int, digests: Sequence[bytes]
) -> list[LiveDocument]:
    """Return the documents of answers to one prompt; DraftstoreError unless there is a digest for each, or none."""
    outputs = [*answers]
    if digests and len(digests) != len(outputs):
        raise DraftstoreError(
            f"{len(digests)} digests for {len(outputs)} answers: pass one for each, or none"
        )
    known = digests or [b""] * len(outputs)
    return [LiveDocument.of(prompt, *each, version) for each in zip(outputs, known, strict=True)]


Test: TypeAlias = Callable[[LiveDocument], bool]


class _Record(NamedTuple):
    start: int
    end: int
    kind: int
    document: LiveDocument


def segments(folder: Path, *kinds: str) -> list[Path]:
    """Return the segments of a log, oldest first, of all kinds or of those given."""
    return sorted(path for path in folder.glob("*-*.*") if path.suffix in (kinds or (LIVE, REST)))


def newest(folder: Path) -> float:
    """Return the Unix seconds at which a log was last changed, even if the clock has been set back since."""
    found = [0.0]
    for path in segments(folder):
        with suppress(FileNotFoundError):
            found.append(max(begun(path), path.stat().st_mtime))
    return max(found)


def begun(path: Path) -> float:
    """Return the Unix seconds in the name of a segment; 0 if another program named the file."""
    head = path.name.partition("-")[0]
    return int(head) / 1000 if head.isdecimal() else 0.0


def documents(path: Path) -> Iterator[tuple[int, LiveDocument]]:
    """Yield the documents of a segment with their places, which never change; none if it is gone."""
    with suppress(FileNotFoundError):
        for record in _records(path.read_bytes()):
            if record.kind == _DOCUMENT:
                yield record.start, record.document


def read_since(path: Path, start: int = 0, stop: int | None = None) -> tuple[list[LiveDocument], int]:
    """Return the documents of a segment from a position on, and the position after the last complete one."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(-1 if stop is None else stop - start)
    found = list(_records(data))
    end = found[-1].end if found else 0
    if lost := _lost(found, end):
        LOG.warning("%s: %d damaged bytes are skipped", path, lost)
    return [record.document for record in found if record.kind == _DOCUMENT], start + end


def _lost(records: Iterable[_Record], end: int) -> int:
    return end - sum(record.end - record.start for record in records)


def damage(path: Path) -> int:
    """Return the bytes of a segment outside valid records, except for the end of one that a process appends to."""
    with suppress(FileNotFoundError):
        open_, data = is_open(path), path.read_bytes()
        found = list(_records(data))
        return _lost(found, found[-1].end if found else 0) if open_ else _lost(found, len(data))
    return 0


def erase(path: Path, unwanted: Test) -> int:
    """Overwrite unwanted documents of a segment, even while its process is appending; return their number."""
    with suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
        hits = [r for r in _records(file.read()) if r.kind == _DOCUMENT and unwanted(r.document)]
        for record in hits:
            nothing = LiveDocument(np.zeros_like(record.document.ids), created=record.document.created)
            file.seek(record.start)
            file.write(_encode(nothing, _ERASED))
        os.fsync(file.fileno())
        return len(hits)
    return 0


def is_open(path: Path) -> bool:
    """Return True if a process is appending to a segment."""
    try:
        lock(path, shared=True, seconds=0).close()
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def applied(path: Path) -> tuple[int, int]:
    """Return the latest state of take-downs that the process of a segment has applied, and its signs of life so far."""
    states = [int(r.document.created) for r in _records(path.read_bytes()) if r.kind == _APPLIED]
    return max(states, default=0), len(states)


def put_to_rest(folder: Path, held: Test) -> int:
    """Put to rest closed segments whose documents are all in a published store; return their number."""
    return _retire(folder, LIVE, held, lambda path: path.rename(path.with_suffix(REST)))


def drop_rested(folder: Path, unwanted: Test) -> int:
    """Delete segments at rest whose documents are all unwanted; return their number."""
    return _retire(folder, REST, unwanted, Path.unlink)


def _retire(folder: Path, kind: str, fits: Test, retire: Callable[[Path], object]) -> int:
    """Retire the closed segments whose documents all fit, while no take-down searches the log."""
    closed = filter(_is_closed, segments(folder, kind))
    retired, fitting = 0, [path for path in closed if all(fits(document) for _, document in documents(path))]
    with lock(folder):
        for path in fitting:
            with suppress(FileNotFoundError):
                retire(path)
                retired += 1
    return retired


class Writer:
    """Appends to segments of this process, with one write per call and no fsync; `path` is the current one."""

    def __init__(self, folder: Path, tokens: int) -> None:
        """Write to a folder, creating it if necessary, in segments of at most `tokens`; OSError if that fails."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder, self._tokens, self._state = folder, tokens, 0
        self._signed = time.monotonic()
        enlarge(folder, tokens)
        self._open()

    def append(self, taken: Iterable[LiveDocument]) -> None:
        """Write all documents or none; OSError if the disk is full."""
        now = time.time()
        dated = (each._replace(created=each.created or now) for each in taken)
        self._write(b"".join(_encode(each, _DOCUMENT) for each in dated))

    def apply(self, state: int) -> None:
        """Record, unless already done, that memory is free of everything taken down up to a state."""
        if state != self._state:
            self._sign(state)
            self._state = state

    def beat(self) -> None:
        """Show those who wait for a state, once per second, that this process is at work on it."""
        if time.monotonic() - self._signed > BEAT_SECONDS:
            with suppress(OSError):  # the disk is full; memory is cleared all the same
                self._sign(self._state)

    def _sign(self, state: int) -> None:
        self._write(_encode(LiveDocument(np.empty(0, np.int32), created=float(state)), _APPLIED))
        self._signed = time.monotonic()

    def roll(self) -> None:
        """Begin a new segment if the current one is old, or large for the log."""
        old = time.monotonic() - self._began > SEGMENT_SECONDS
        most = _TOKEN.itemsize * self._tokens
        large = self.size > most and self.size > _TOKEN.itemsize * settings_of(self.folder).tokens
        if self.size and (old or large):
            state = self._state
            self.reopen()
            self.apply(state)

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to the current segment; else its folder was moved, removed or replaced."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        return False

    def reopen(self) -> None:
        """Begin a new segment; OSError if the folder is gone."""
        file = self._file
        if not settings_of(self.folder).tokens:  # another folder than before
            enlarge(self.folder, self._tokens)
        self._open()
        os.close(file)

    def close(self) -> None:
        """Close the segment, and delete it if it is empty."""
        if not self.size and self.in_place:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def _open(self) -> None:
        stamp = int(max(time.time(), newest(self.folder)) * 1000) + 1
        path = self.folder / f"{stamp:016d}-{secrets.token_hex(4)}{LIVE}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        try:
            hold(file)  # others see by the lock that it is in use
        except OSError:
            os.close(file)
            raise
        self._began, self.size, self._state, self.path, self._file = time.monotonic(), 0, 0, path, file

    def _write(self, data: bytes) -> None:
        if os.pwrite(self._file, data, self.size) < len(data):
            os.ftruncate(self._file, self.size)
            raise OSError("the disk is full")
        self.size += len(data)


def limit(folder: Path, tokens: int) -> int:
    """Keep a log for a memory of `tokens`, until a process with a larger one starts; return the documents deleted."""
    change(folder, lambda found: found._replace(tokens=tokens))
    return drop_oldest(folder)


def most_bytes(tokens: int) -> int:
    """Return the limit of a log for a memory of `tokens`."""
    return LOGGED * _TOKEN.itemsize * tokens


def drop_oldest(folder: Path) -> int:
    """Delete the oldest closed segments of a log beyond its limit, and empty ones; return the documents deleted."""
    most, total, dropped = most_bytes(settings_of(folder).tokens), 0, 0
    for path in reversed(segments(folder)):
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            if (total > most > 0 or not size) and _is_closed(path):
                dropped += sum(1 for _ in documents(path))
                path.unlink()
            total += size
    return dropped


def _is_closed(path: Path) -> bool:
    """Return True if no process appends to a segment any more; a new, empty one may be about to be locked."""
    with suppress(FileNotFoundError):
        found = path.stat()
        begun = found.st_size > 0 or time.time() - found.st_mtime > SEGMENT_SECONDS
        return begun and not is_open(path)
    return False


def _encode(document: LiveDocument, kind: int) -> bytes:
    ids, digest = document.ids.astype(_TOKEN, copy=False), document.digest
    origin = (_ANSWER if document.alone else _RECORD) if digest else _UNKNOWN
    known = document.prompt_size, document.created, digest, document.prompt, document.version
    body = _HEAD.pack(0, kind, origin, 0, len(ids), *known)[4:] + ids.tobytes()
    return struct.pack("<I", zlib.crc32(body)) + body


def _records(data: bytes) -> Iterator[_Record]:
    """Yield the valid records of a segment; after a damaged one, the next one is searched for."""
    start = 0
    while start + _HEAD.size <= len(data):
        if (record := _record_at(data, start)) is None:
            start += _TOKEN.itemsize
        else:
            yield record
            start = record.end


def _record_at(data: bytes, start: int) -> _Record | None:
    check, kind, origin, zero, count, prompt_size, created, digest, *known = _HEAD.unpack_from(data, start)
    end = start + _HEAD.size + _TOKEN.itemsize * count
    if kind > _APPLIED or origin > _ANSWER or zero or prompt_size > count or not isfinite(created):
        return None
    if end > len(data) or zlib.crc32(memoryview(data)[start + 4 : end]) != check:
        return None
    ids = np.frombuffer(data, _TOKEN, count, start + _HEAD.size)
    found = LiveDocument(ids, prompt_size, digest if origin else b"", origin == _ANSWER, created, *known)
    return _Record(start, end, kind, found)
