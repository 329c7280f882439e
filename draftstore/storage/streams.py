"""Files, plain or compressed (.gz, .bz2, .xz, .zst), read by line or whole, with size limits."""

import errno
import gzip
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

FORMATS: dict[str, tuple[Callable[[], Any], tuple[bytes, ...]]] = {
    ".gz": (lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), (b"\x1f\x8b",)),
    ".bz2": (lambda: import_module("bz2").BZ2Decompressor(), (b"BZh",)),
    ".xz": (lambda: import_module("lzma").LZMADecompressor(), (b"\xfd7zXZ\0",)),
    ".zst": (
        lambda: zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj(),
        (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
    ),
}
"""How to read a member of a compressed file, and how it begins. Some builds of Python lack bz2 or lzma."""
COMPRESSION_SUFFIXES = tuple(FORMATS)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
MAX_RECORD_BYTES = 1 << 27
"""Maximum bytes of a line or text file; longer ones are probably mistakes (no line breaks) and would fill memory."""
CHUNK_BYTES, PACKED_BYTES = 1 << 20, 256
"""Bytes read and decompressed at a time: at most 8 MB, as 4 bytes of zstandard may expand to a block of 128 kB."""
ZSTD_WINDOW = 1 << 31
STREAM_ERRORS = (OSError, EOFError)


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


def _packed(file: BinaryIO, suffix: str) -> Any:
    if suffix == ".zst":
        return zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    if suffix == ".gz":
        return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
    library = {".bz2": "bz2", ".xz": "lzma"}.get(suffix)
    return import_module(library).open(file, "wb") if library else nullcontext(file)


def open_content(path: Path, magics: Iterable[bytes] = (b"",)) -> BufferedReader:
    """Open a file that begins with one of these; OSError EINVAL if it does not, or is a pointer to its content."""
    file = path.open("rb")
    pointer = (start := file.peek(len(LFS_POINTER))).startswith(LFS_POINTER)
    if pointer or not _begins(start, magics):
        file.close()
        what = "a Git LFS pointer: `git lfs pull` fetches it" if pointer else f"no {path.suffix} data"
        raise OSError(errno.EINVAL, f"the content is {what}")
    return file


def _begins(data: bytes, magics: Iterable[bytes]) -> bool:
    """Return True if data, which may be cut, begins with one of these."""
    return any(magic.startswith(data[: len(magic)]) for magic in magics)


def _chunks(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield a file's content, decompressed by its suffix; zero bytes behind a member are padding."""
    make, magics = FORMATS.get(path.suffix.lower(), (None, (b"",)))
    with open_content(path, magics) as file:
        if make is None:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")
            return
        read = partial(file.read, PACKED_BYTES)
        if not (packed := read()):
            raise EOFError("the file is empty, but even empty compressed files have a header")
        while packed and _begins(packed, magics):
            packed = (yield from _member(make(), packed, read)).lstrip(b"\0")
            while len(packed) < 6 and (more := read()):
                packed = (packed + more).lstrip(b"\0")
        if packed:
            notes.append("other bytes behind the compressed data were ignored")


def _member(member: Any, packed: bytes, read: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    """Decompress a member that begins with `packed`, and return the bytes that were read behind it."""
    limit = [CHUNK_BYTES] if hasattr(member, "needs_input") else []
    while True:
        try:
            chunk = member.decompress(packed, *limit)
        except Exception as error:  # noqa: BLE001 (every library has its own errors)
            raise OSError(str(error)) from None
        if chunk:
            yield chunk
        if member.eof:
            return bytes(member.unused_data)
        hungry = getattr(member, "needs_input", True)
        if not (packed := read() if hungry else b"") and hungry:
            raise EOFError("the compressed data is truncated")
