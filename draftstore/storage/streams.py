"""Files, plain or compressed (.gz, .bz2, .xz, .zst), read by line or whole, with size limits."""

import gzip
import importlib
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

MAGIC = {
    ".gz": (b"\x1f\x8b",),
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\0",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
}
"""How the members of compressed files begin; for zstandard, also frames to skip."""
MAGIC_BYTES = 6
COMPRESSION_SUFFIXES = tuple(MAGIC)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_RECORD_BYTES = 1 << 27
"""Maximum bytes of a line or text file; longer ones are probably mistakes (no line breaks) and would fill memory."""
CHUNK_BYTES = 1 << 20
PACKED_BYTES, ZSTD_BYTES = 1 << 14, 256
"""Bytes decompressed at a time: of zstandard, at most 8 MB of output, as 4 bytes may expand to a block of 128 kB."""
ZSTD_WINDOW = 1 << 31
STREAM_ERRORS = (OSError, EOFError)


class ForeignError(OSError):
    """A file's content is not of its kind; the message says what it is instead, or what to do."""


def read_whole(path: Path, notes: list[str]) -> bytes | None:
    """Return a file's content, or None if it exceeds `MAX_RECORD_BYTES`; otherwise like `read_lines`."""
    data = bytearray()
    for chunk in _chunks(path, notes):
        data += chunk
        if len(data) > MAX_RECORD_BYTES:
            return None
    return bytes(data)


def read_lines(path: Path, notes: list[str]) -> Iterator[bytes | None]:
    """Yield a file's lines with their line feeds; raises `STREAM_ERRORS`.

    A line longer than `MAX_RECORD_BYTES` is None. `notes` receives what was ignored.
    """
    return split_lines(_chunks(path, notes))


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Split a stream after line feeds only; a line above `MAX_RECORD_BYTES` is dropped and yields None."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end, b"\n"]) if size + len(end) <= MAX_RECORD_BYTES else None
            parts, size = [], 0
        size += len(rest)
        parts = [*parts, rest] if size <= MAX_RECORD_BYTES else []
    if size:
        yield b"".join(parts) if size <= MAX_RECORD_BYTES else None


def write_lines(path: Path, lines: Iterable[bytes], suffix: str) -> None:
    """Write lines, given without line feeds, compressed according to `suffix`; equal lines give equal bytes."""
    with path.open("wb") as file, _packed(file, suffix.lower()) as packed:
        for line in lines:
            packed.write(line + b"\n")


def _packed(file: BinaryIO, suffix: str) -> AbstractContextManager[Any]:
    if suffix == ".zst":
        return zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    if suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    packed: AbstractContextManager[Any] = (
        _library(suffix).open(file, "wb") if suffix in MAGIC else nullcontext(file)
    )
    return packed


def _library(suffix: str) -> Any:
    """Return the library of .bz2 or .xz, which some builds of Python lack."""
    return importlib.import_module("bz2" if suffix == ".bz2" else "lzma")


def open_content(path: Path) -> BufferedReader:
    """Open a file; a `ForeignError` if it is only a pointer to its content."""
    file = path.open("rb")
    if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
        file.close()
        raise ForeignError("a Git LFS pointer: `git lfs pull` fetches the file")
    return file


def _chunks(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield a file's content, decompressed by its suffix."""
    suffix = path.suffix.lower()
    with open_content(path) as file:
        if suffix not in MAGIC:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")
            return
        read = partial(file.read, ZSTD_BYTES if suffix == ".zst" else PACKED_BYTES)
        packed = read()
        if not packed:
            raise EOFError("the file is empty, but even empty compressed files have a header")
        if not _begins(packed, suffix):
            raise ForeignError(f"its content is no {suffix} data")
        while packed and _begins(packed, suffix):
            packed = (yield from _member(suffix, packed, read)).lstrip(b"\0")
            while len(packed) < MAGIC_BYTES and (more := read()):
                packed = (packed + more).lstrip(b"\0")
        if packed:
            notes.append("other bytes behind the compressed data were ignored")


def _begins(packed: bytes, suffix: str) -> bool:
    """Return True if bytes are the beginning of a member, which may be cut."""
    return any(magic.startswith(packed[: len(magic)]) for magic in MAGIC[suffix])


def _member(suffix: str, packed: bytes, read: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    """Decompress the member of a file that begins with `packed`, and return the bytes that were read behind it."""
    member, full = _unpacker(suffix), False
    while not member.eof:
        if not packed and not full:
            raise EOFError("the compressed data is truncated")
        try:
            chunk = member.decompress(packed, *([] if suffix == ".zst" else [CHUNK_BYTES]))
        except Exception as error:  # noqa: BLE001 (every library has its own errors)
            raise OSError(str(error)) from None
        if chunk:
            yield chunk
        full = len(chunk) == CHUNK_BYTES  # there may be more of it
        packed = getattr(member, "unconsumed_tail", b"")
        if not (packed or full or member.eof):
            packed = read()
    return bytes(member.unused_data)


def _unpacker(suffix: str) -> Any:
    if suffix == ".zst":
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
    if suffix == ".gz":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    return _library(suffix).BZ2Decompressor() if suffix == ".bz2" else _library(suffix).LZMADecompressor()
