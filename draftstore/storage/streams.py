"""Files, plain or compressed (.gz, .zst), read by line or whole, with size limits."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

COMPRESSION_SUFFIXES = (".gz", ".zst")
MAX_RECORD_BYTES = 1 << 27
"""Maximum bytes of a line or text file; longer ones are probably mistakes (no line breaks) and would fill memory."""
PACKED_BYTES = 256
"""Bytes decompressed at a time: at most 8 MB of output, as 4 bytes of zstandard may expand to a block of 128 kB."""
ZSTD_WINDOW = 1 << 31
STREAM_ERRORS = (OSError, EOFError, zlib.error)


def read_whole(path: Path) -> bytes | None:
    """Return a file's content, or None if it exceeds `MAX_RECORD_BYTES`; raises `STREAM_ERRORS`."""
    data = bytearray()
    for chunk in _chunks(path):
        data += chunk
        if len(data) > MAX_RECORD_BYTES:
            return None
    return bytes(data)


def read_lines(path: Path) -> Iterator[bytes | None]:
    """Yield a file's lines with their line feeds; raises `STREAM_ERRORS`.

    A line longer than `MAX_RECORD_BYTES` is None.
    """
    return split_lines(_chunks(path))


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
    return nullcontext(file)


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's content, decompressed by its suffix."""
    packed = path.suffix.lower() in COMPRESSION_SUFFIXES
    with path.open("rb") as file:
        if packed and not file.peek(1):
            raise EOFError("the file is empty, but even empty compressed files have a header")
        if path.suffix.lower() == ".zst":
            yield from _zstd_chunks(file)
        elif path.suffix.lower() == ".gz":
            with gzip.open(file) as unpacked:
                yield from iter(lambda: unpacked.read1(1 << 20), b"")  # read() would lose data if truncated
        else:
            yield from iter(lambda: file.read(1 << 20), b"")


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Decompress zstandard frames; unlike the package's reader, detects a truncated last frame."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame = None
    while packed := file.read(PACKED_BYTES):
        while packed:
            frame = frame or unpacker.decompressobj()
            try:
                if chunk := frame.decompress(packed):
                    yield chunk
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the zstandard stream is truncated")
