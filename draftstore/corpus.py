"""Corpora: streams of documents with stable ids, read from JSON Lines, Parquet, text and source trees.

A broken record is counted and reported with its place and never ends the reading, unless `strict` asks for
that; a path that is not there, or of a kind that nobody can read, always does.
"""

import dataclasses
import fnmatch
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias, TypeVar

from draftstore.errors import CorpusError, TokenizerError
from draftstore.tokenizer import Message, needs_extra

TEXT_SUFFIXES = (
    *(
        ".c",
        ".cc",
        ".cpp",
        ".cs",
        ".cu",
        ".cuh",
        ".cxx",
        ".f90",
        ".h",
        ".hh",
        ".hpp",
        ".m",
        ".rs",
        ".swift",
        ".zig",
    ),
    *(".clj", ".dart", ".erl", ".ex", ".exs", ".go", ".hs", ".java", ".kt", ".ml", ".mli", ".scala"),
    *(".css", ".html", ".js", ".jsx", ".mjs", ".scss", ".svelte", ".ts", ".tsx", ".vue"),
    *(".bash", ".jl", ".lua", ".php", ".pl", ".pm", ".py", ".pyi", ".pyx", ".r", ".rb", ".sh", ".sql"),
    *(".cmake", ".md", ".proto", ".rst", ".tex", ".toml", ".txt", ".yaml", ".yml"),
)
SOURCE_PATTERNS = tuple(f"*{suffix}" for suffix in TEXT_SUFFIXES)
LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
COMPRESSION_SUFFIXES = (".gz", ".zst")
SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__"})
ACCEPTED = (
    "a folder of text or source files; a JSON Lines file (.jsonl, .ndjson, .json); a .parquet file; "
    "a text or source file (.txt, .md, .py, ...); all but .parquet also packed (.gz, .zst)"
)
MAX_RECORD_BYTES = (
    1 << 29
)  # a line or text file above this is a mistake (no line breaks), and would fill memory
READ_BYTES = 1 << 16  # compressed bytes read at a time: bounds what one step of decompression can give
TOO_LARGE = f"larger than {MAX_RECORD_BYTES:,} bytes"
PARQUET_ROWS = 256
PROBLEMS_KEPT = 20
ZSTD_WINDOW = 1 << 31
STREAM_ERRORS = (OSError, EOFError, zlib.error)

T = TypeVar("T")
Render: TypeAlias = Callable[[Sequence[Message]], str]


class _BadRecordError(Exception):
    """A record holds no usable text; the message says why."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of a corpus.

    Attributes:
        id: the record's own `id`, else its place `file#line`, the file relative to what was asked for.
        text: never empty.
    """

    id: str
    text: str


@dataclasses.dataclass(frozen=True)
class RecordProblem:
    """A record that could not be read: where (`file:line 7`), and why."""

    place: str
    reason: str


@dataclasses.dataclass
class ReadReport:
    """What a reading met so far.

    Attributes:
        documents: texts handed on.
        bad_records: records that could not be read.
        empty_documents: texts of nothing but white space, skipped.
        problems: the first `PROBLEMS_KEPT` bad records.
    """

    documents: int = 0
    bad_records: int = 0
    empty_documents: int = 0
    problems: list[RecordProblem] = dataclasses.field(default_factory=list)

    def add_problem(self, problem: RecordProblem) -> None:
        """Count a bad record, and keep it if it is among the first."""
        self.bad_records += 1
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """A file to read: its path, its name in document ids, and its `kind` (`lines`, `parquet` or `text`)."""

    path: Path
    name: str
    kind: str


def read_corpus(
    paths: Sequence[Path],
    *,
    render: Render,
    report: ReadReport,
    column: str = "text",
    glob: str | Sequence[str] = SOURCE_PATTERNS,
    strict: bool = False,
) -> Iterator[Document]:
    """Stream the documents of files and folders, always in the same order.

    A record of JSON Lines or Parquet holds its text under `column`, or a conversation under `messages` (or
    under `column`): a list of objects with `role` and `content`.

    Args:
        paths: files and folders; a file named twice is read once.
        render: turns a conversation into text.
        report: counts what is read, while it is read.
        column: key or column of the text.
        glob: which files of a folder, by name (`*.py`) or relative path (`src/**/*.py`). Folders below that
            are hidden, hold installed packages or caches, or are symbolic links are left out. A data file
            (`.jsonl`, `.parquet`, ...) in a folder is read where a pattern names its suffix.
        strict: end at the first bad record.

    Raises:
        CorpusError: at once where a path is missing or of an unknown kind, or a folder holds no file that
            matches; while reading where a Parquet file lacks the column, or `strict` met a bad record.
        MissingExtraError: while reading, where `pyarrow` or `zstandard` is needed and absent.
    """
    readers: dict[str, Callable[[CorpusFile], Iterator[Document | RecordProblem]]] = {
        "lines": lambda file: _read_lines(file, column, render),
        "parquet": lambda file: _read_parquet(file, column, render),
        "text": _read_text,
    }
    items = chain.from_iterable(readers[file.kind](file) for file in list_files(paths, glob))
    return _counted(items, report, strict)


def corpus_fingerprint(
    paths: Sequence[Path], *, glob: str | Sequence[str] = SOURCE_PATTERNS, **options: str | int | bool
) -> str:
    """Return a cheap identity of a corpus: SHA-256 over its files' paths, sizes and times, and `options`.

    It tells whether a half-finished build may go on; the texts themselves are not read.

    Raises:
        CorpusError: as `read_corpus`.
    """
    stats = [(str(file.path.resolve()), file.name, file.path.stat()) for file in list_files(paths, glob)]
    files = [(path, name, stat.st_size, stat.st_mtime_ns) for path, name, stat in stats]
    return hashlib.sha256(json.dumps([files, options], sort_keys=True).encode()).hexdigest()


def list_files(paths: Sequence[Path], glob: str | Sequence[str] = SOURCE_PATTERNS) -> list[CorpusFile]:
    """Return the files that `read_corpus` reads, in its order: paths as given, folders sorted by name.

    Raises:
        CorpusError: as `read_corpus`.
    """
    if not paths:
        raise CorpusError(f"no corpus is named: give {ACCEPTED}")
    patterns = (glob,) if isinstance(glob, str) else tuple(glob)
    absolute = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100 (resolve() would follow links)
    root = Path(os.path.commonpath([path if path.is_dir() else path.parent for path in absolute]))
    files: dict[Path, CorpusFile] = {}
    for path in absolute:
        for found, kind in _folder_files(path, patterns) if path.is_dir() else [(path, _file_kind(path))]:
            files.setdefault(found, CorpusFile(found, found.relative_to(root).as_posix(), kind))
    return list(files.values())


def _file_kind(path: Path) -> str:
    """Return the kind of a file that the user named.

    Raises:
        CorpusError: not there, or of no known kind.
    """
    if not path.is_file():
        raise CorpusError(f"no such file or folder: {path}")
    kind = _suffix_kind(path.name)
    if kind is None:
        raise CorpusError(f"{path} is of no kind that can be read: give {ACCEPTED}")
    return kind


def _suffix_kind(name: str) -> str | None:
    """Return the kind that a file name's end tells, or None."""
    path = PurePosixPath(name.lower())
    if path.suffix == PARQUET_SUFFIX:
        return "parquet"
    suffix = PurePosixPath(path.stem).suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix
    if suffix in LINES_SUFFIXES:
        return "lines"
    return "text" if suffix in TEXT_SUFFIXES else None


def _folder_files(folder: Path, patterns: Sequence[str]) -> list[tuple[Path, str]]:
    """Return path and kind of a folder's files that match, sorted by relative path.

    Raises:
        CorpusError: none does.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in names:
            path = Path(place, name)
            kind = _matched_kind(path.relative_to(folder).as_posix(), patterns)
            if kind is not None and path.is_file():
                found.append((path, kind))
    if not found:
        shown = ", ".join(patterns[:6]) + (", ..." if len(patterns) > 6 else "")
        raise CorpusError(
            f"{folder} holds no file that matches {shown}: name others by a pattern, such as '*.jsonl.zst'"
        )
    return sorted(found, key=lambda item: item[0].relative_to(folder).as_posix())


def _matched_kind(name: str, patterns: Sequence[str]) -> str | None:
    """Return how to read a folder's file under these patterns, or None where they leave it out."""
    matching = [pattern for pattern in patterns if _matches(name, pattern)]
    kind = _suffix_kind(name)
    if kind in ("lines", "parquet"):
        return kind if any(_suffix_kind(pattern) == kind for pattern in matching) else None
    return "text" if matching else None


def _matches(name: str, pattern: str) -> bool:
    """Match a relative path with a pattern; `**/` stands for any folders, or none."""
    target = name if "/" in pattern else name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(target, form) for form in (pattern, pattern.replace("**/", "")))


def _counted(
    items: Iterable[Document | RecordProblem], report: ReadReport, strict: bool
) -> Iterator[Document]:
    """Hand on the documents that hold text, and count everything."""
    for item in items:
        if isinstance(item, RecordProblem):
            if strict:
                raise CorpusError(f"{item.place}: {item.reason}")
            report.add_problem(item)
        elif not item.text or item.text.isspace():
            report.empty_documents += 1
        else:
            report.documents += 1
            yield item


def _read_text(file: CorpusFile) -> Iterator[Document | RecordProblem]:
    """Yield a whole file as one document."""
    yield _attempt(str(file.path), lambda: Document(file.name, _whole_text(file.path)))


def _whole_text(path: Path) -> str:
    data = bytearray()
    for chunk in _chunks(path):
        data += chunk
        if len(data) > MAX_RECORD_BYTES:
            raise _BadRecordError(TOO_LARGE)
    return data.decode("utf-8-sig")


def read_json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Stream place (`file:line 7`) and object of each line of a JSON Lines file, plain or packed.

    Raises:
        CorpusError: no such file, one of another kind, or, while reading, the first bad line.
    """
    if _file_kind(path) != "lines":
        raise CorpusError(f"{path} is not JSON Lines: expected {', '.join(LINES_SUFFIXES)}, plain or packed")
    for number, record in _line_records(path):
        if isinstance(record, RecordProblem):
            raise CorpusError(f"{record.place}: {record.reason}")
        yield f"{path}:line {number}", record


def _read_lines(file: CorpusFile, column: str, render: Render) -> Iterator[Document | RecordProblem]:
    """Yield one document for each line that is not blank."""
    for number, record in _line_records(file.path):
        if isinstance(record, RecordProblem):
            yield record
        else:
            make = partial(_record_document, record, f"{file.name}#{number}", column, render)
            yield _attempt(f"{file.path}:line {number}", make)


def _line_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | RecordProblem]]:
    """Yield number and object of each line that is not blank; a stream that breaks off is a last problem."""
    number = 0
    try:
        for number, line in enumerate(_lines(_chunks(path)), start=1):
            if line is None or line.strip():
                yield number, _attempt(f"{path}:line {number}", partial(_parse_line, line))
    except STREAM_ERRORS as error:
        number += 1
        reason = f"cannot be read from here on: {_reason(error)}"
        yield number, RecordProblem(f"{path}:line {number}", reason)


def _parse_line(line: bytes | None) -> dict[str, Any]:
    """Return the object on a line, of which None was too long to keep.

    Raises:
        _BadRecordError, ValueError, RecursionError: there is none.
    """
    if line is None:
        raise _BadRecordError(TOO_LARGE)
    text = line.decode("utf-8").removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        raise _BadRecordError("a JSON array, expected one object a line: `jq -c '.[]'` writes such a file")
    record = json.loads(text)
    if not isinstance(record, dict):
        raise _BadRecordError(f"a JSON {type(record).__name__}, expected an object")
    return record


def _read_parquet(file: CorpusFile, column: str, render: Render) -> Iterator[Document | RecordProblem]:
    """Yield one document for each row, a batch of rows in memory at a time."""
    with needs_extra("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    number = 0
    try:
        with parquet.ParquetFile(file.path) as reader:
            columns = _parquet_columns(reader.schema_arrow.names, column, file.path)
            batches = reader.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            rows = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                make = partial(_record_document, row, f"{file.name}#{number}", column, render)
                yield _attempt(f"{file.path}:row {number}", make)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield RecordProblem(f"{file.path}:row {number + 1}", f"cannot be read from here on: {_reason(error)}")


def _parquet_columns(names: Sequence[str], column: str, path: Path) -> list[str]:
    """Return the columns to read: the text's or else the conversation's, and the ids where there are any.

    Raises:
        CorpusError: neither is there.
    """
    text = next((name for name in (column, "messages") if name in names), None)
    if text is None:
        raise CorpusError(
            f"{path} has no column {column!r}, only {', '.join(names)}: name the one with the text"
        )
    return [text] + ["id"] * ("id" in names)


def _attempt(place: str, make: Callable[[], T]) -> T | RecordProblem:
    """Return what `make` makes of a record, or what is wrong with the record."""
    try:
        return make()
    except json.JSONDecodeError as error:
        return RecordProblem(place, f"not JSON: {error}")
    except (
        _BadRecordError,
        UnicodeError,
        ValueError,
        RecursionError,
        TokenizerError,
        *STREAM_ERRORS,
    ) as error:
        return RecordProblem(place, _reason(error))


def _record_document(record: Mapping[str, Any], place: str, column: str, render: Render) -> Document:
    """Return a record's document; `place` is its id if the record has none.

    Raises:
        _BadRecordError: no text or conversation in it, or one of the wrong type.
        TokenizerError: the chat template refuses the conversation.
    """
    key = column if column in record else "messages"
    if key not in record:
        raise _BadRecordError(f"has neither {column!r} nor 'messages'")
    text = record[key]
    if isinstance(text, list):
        text = _render_messages(text, key, render)
    if not isinstance(text, str):
        raise _BadRecordError(f"{key!r} is a {type(text).__name__}, expected text or a list of messages")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRecordError(f"{key!r} is not valid Unicode: it holds half of a surrogate pair") from None
    found = record.get("id")
    named = isinstance(found, str | int) and not isinstance(found, bool) and found != ""
    return Document(str(found) if named else place, text)


def _render_messages(messages: list[Any], key: str, render: Render) -> str:
    """Return a conversation as text; one in which nobody says anything is empty.

    Raises:
        _BadRecordError: a message is not an object with `role` and `content` as text.
        TokenizerError: the chat template refuses the conversation.
    """
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _BadRecordError(f"{key}[{position}] is a {type(message).__name__}, expected an object")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise _BadRecordError(f"{key}[{position}] has no text under {field!r}")
    return render(messages) if any(message["content"].strip() for message in messages) else ""


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Split a stream at line feeds alone; a line above `MAX_RECORD_BYTES` is dropped and comes as None."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end]) if size + len(end) <= MAX_RECORD_BYTES else None
            parts, size = [], 0
        size += len(rest)
        parts = [*parts, rest] if size <= MAX_RECORD_BYTES else []
    if size:
        yield b"".join(parts) if size <= MAX_RECORD_BYTES else None


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, unpacked if its name says that they are packed.

    Raises:
        OSError, EOFError, zlib.error: not readable, damaged, or cut short.
    """
    with path.open("rb") as file:
        if path.suffix.lower() == ".zst":
            yield from _zstd_chunks(file)
        elif path.suffix.lower() == ".gz":
            with gzip.open(file) as unpacked:
                yield from iter(lambda: unpacked.read1(1 << 20), b"")  # read() would lose what precedes a cut
        else:
            yield from iter(lambda: file.read(1 << 20), b"")


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Unpack a file of zstandard frames; unlike the package's own reader, notice that the last one is cut."""
    with needs_extra("zstandard"):
        import zstandard
    unpacker = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW)
    frame = None
    while packed := file.read(READ_BYTES):
        while packed:
            frame = frame or unpacker.decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the zstandard stream is cut short")


def _reason(error: Exception) -> str:
    """Return what an error says, or its kind where it says nothing; an OSError without the path again."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
