"""One file of a corpus as a stream of documents: JSON Lines, Parquet, or text; plain or compressed.

A bad record yields a `RecordProblem` with its position and never stops the stream.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

from draftstore.errors import CorpusError, TokenizerError, needs_extra, type_name
from draftstore.storage.report import RecordProblem
from draftstore.storage.streams import (
    COMPRESSION_SUFFIXES,
    MAX_RECORD_BYTES,
    STREAM_ERRORS,
    open_content,
    read_lines,
    read_whole,
)
from draftstore.text.chat import Message, as_messages
from draftstore.text.digests import Identity, identify
from draftstore.text.selecting import TEXTS, Numbered, RecordOptions, advice, select

TEXT_SUFFIXES = (
    *(".c", ".cc", ".cpp", ".cs", ".cu", ".cuh", ".cxx", ".f90", ".h", ".hh", ".hpp"),
    *(".m", ".rs", ".swift", ".zig"),
    *(".clj", ".dart", ".erl", ".ex", ".exs", ".go", ".hs", ".java", ".kt", ".ml", ".mli", ".scala"),
    *(".css", ".html", ".js", ".jsx", ".mjs", ".scss", ".svelte", ".ts", ".tsx", ".vue"),
    *(".bash", ".jl", ".lua", ".php", ".pl", ".pm", ".py", ".pyi", ".pyx", ".r", ".rb", ".sh", ".sql"),
    *(".cmake", ".md", ".proto", ".rst", ".tex", ".toml", ".txt", ".yaml", ".yml"),
)
LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
CONVERSATIONS = ("messages", "conversations")
"""Keys of conversations in records; the second is ShareGPT's."""
TURNS = RecordOptions(column=CONVERSATIONS[0])
ACCEPTED = (
    "a folder of text or source files; a JSON Lines file (.jsonl, .ndjson, .json); a .parquet file; "
    f"a text or source file (.txt, .md, ...); all but .parquet also compressed ({', '.join(COMPRESSION_SUFFIXES)})"
)
WHOLE = "get the whole file"
CUT = re.compile("not JSON: (?!Extra data)|.*unexpected end of data")
"""Reasons of bad lines that may have been cut."""
TOO_LARGE = f"larger than {MAX_RECORD_BYTES:,} bytes"
PARQUET_ROWS = 32

T = TypeVar("T")
Render: TypeAlias = Callable[[Sequence[Message]], str]


@dataclasses.dataclass(frozen=True)
class Document:
    """One text; `id` is its record's, else its position `file#line`, with the file relative to the given path."""

    id: str
    text: str
    identity: Identity

    @classmethod
    def plain(cls, id_: str, text: str) -> "Document":
        """Return the document of a text that is not a conversation."""
        return cls(id_, text, identify(text))


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """A file to read: `name` is used in document ids, `kind` is `lines`, `parquet`, `text` or a custom reader's."""

    path: Path
    name: str
    kind: str

    @property
    def unit(self) -> str:
        """The kind of its records."""
        return "line" if self.kind == "lines" else "row"


Read: TypeAlias = Callable[[CorpusFile, RecordOptions, Render], Iterator[Document | RecordProblem | None]]
"""Streams the documents of a file, as `read_documents` does."""


def kind_of_name(name: str) -> str | None:
    """Return the kind of a file by its suffix, or None."""
    path = PurePosixPath(name.lower())
    if path.suffix == PARQUET_SUFFIX:
        return "parquet"
    suffix = PurePosixPath(path.stem).suffix if path.suffix in COMPRESSION_SUFFIXES else path.suffix
    if suffix in LINES_SUFFIXES:
        return "lines"
    return "text" if suffix in TEXT_SUFFIXES else None


def ending_of_name(name: str) -> str:
    """Return the suffix that determines a file's kind: `.parquet`, `.jsonl.gz`."""
    path = PurePosixPath(name)
    packed = path.suffix.lower() in COMPRESSION_SUFFIXES
    return PurePosixPath(path.stem).suffix + path.suffix if packed else path.suffix


def kind_of_file(path: Path) -> str:
    """Return the kind of a file named by the user."""
    if not path.is_file():
        raise CorpusError(f"no such file or folder: {path}")
    kind = kind_of_name(path.name)
    if kind is None:
        raise CorpusError(f"{path} cannot be read: unknown file type; expected {ACCEPTED}")
    return kind


def read_documents(
    file: CorpusFile, records: RecordOptions, render: Render
) -> Iterator[Document | RecordProblem | None]:
    """Stream the documents of one file: texts, or conversations that `render` turns into text.

    A record that does not match the condition yields None. CorpusError if a Parquet file lacks a column, or the
    condition cannot be evaluated; MissingExtraError if it needs `polars`, or the file `pyarrow`.
    """
    if file.kind == "text":
        records.refuse(str(file.path))
        notes: list[str] = []
        yield _attempt(str(file.path), lambda: Document.plain(file.name, _whole_text(file.path, notes)))
        yield from (RecordProblem(str(file.path), note) for note in notes)
        return
    for number, record in select(_numbered(file, records), records.where, file.path, file.unit):
        if record is None or isinstance(record, RecordProblem):
            yield record
        else:
            make = partial(_record_document, record, f"{file.name}#{number}", records, render)
            yield _attempt(f"{file.path}:{file.unit} {number}", make)


def _whole_text(path: Path, notes: list[str]) -> str:
    data = read_whole(path, notes)
    if data is None:
        raise CorpusError(TOO_LARGE)
    return _decoded(data)


def _decoded(data: bytes) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[:4].count(0) == 2:
        raise CorpusError("UTF-16, expected UTF-8: `iconv -f UTF-16 -t UTF-8` converts the file")
    return data.decode("utf-8-sig")


def read_json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield position (`file:line 7`) and object of each record; CorpusError as below, or for a bad one."""
    for place, record in read_objects(path):
        if isinstance(record, RecordProblem):
            raise CorpusError(f"{record.place}: {record.reason}")
        yield place, record


def read_objects(
    path: Path, records: RecordOptions = TURNS
) -> Iterator[tuple[str, dict[str, Any] | RecordProblem]]:
    """Yield position and object or problem of each line of JSON Lines, or of each row of a Parquet file.

    Of a row, only the conversation is read, or what `records` name. CorpusError if there is no such file, it is of
    another kind, or a Parquet file lacks these columns.
    """
    kind = kind_of_file(path)
    if kind == "text":
        raise CorpusError(f"{path} is not JSON Lines: expected {', '.join(LINES_SUFFIXES)}, or compressed")
    file = CorpusFile(path, path.name, kind)
    for number, record in _numbered(file, records):
        yield f"{path}:{file.unit} {number}", record


def _numbered(file: CorpusFile, records: RecordOptions) -> Iterator[Numbered]:
    return _line_records(file.path) if file.kind == "lines" else _parquet_records(file, records)


def _line_records(path: Path) -> Iterator[Numbered]:
    """Yield number and object of each non-blank line; a truncated file ends with a problem that reports it."""
    number, notes = 0, list[str]()
    try:
        for number, line in enumerate(read_lines(path, notes), start=1):
            if line is None or line.strip():
                record = _attempt(f"{path}:line {number}", partial(_parse_line, line))
                # In a truncated file, the last line begins as an object and has no line feed.
                begun = line is not None and line.lstrip()[:1] == b"{" and line[-1:] != b"\n"
                if isinstance(record, RecordProblem) and begun and CUT.match(record.reason):
                    reason = f"the file ends in the middle of a record: {record.reason}: {WHOLE}"
                    record = RecordProblem(record.place, reason, truncated=True)
                yield number, record
    except STREAM_ERRORS as error:
        yield number + 1, _broken_off(f"{path}:line {number + 1}", error)
    yield from ((number + 1, RecordProblem(str(path), note)) for note in notes)


def _broken_off(place: str, error: Exception) -> RecordProblem:
    advice = "" if getattr(error, "errno", None) else f": {WHOLE}"
    return RecordProblem(place, f"cannot be read from here on: {_reason(error)}{advice}", truncated=True)


def _parse_line(line: bytes | None) -> dict[str, Any]:
    """Return the object on a line; a line of None exceeded the size limit."""
    if line is None:
        raise CorpusError(TOO_LARGE)
    text = _decoded(line)
    if text.lstrip().startswith("["):
        raise CorpusError("a JSON array, expected one object per line: `jq -c '.[]'` converts the file")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        extra = error.msg == "Extra data"
        if extra and "\r" in text[: error.pos]:
            raise CorpusError("lines end with CR alone: `tr '\\r' '\\n'` converts the file") from None
        if not extra and re.match(r"(?=\{).*[{\[,]\s*\n", text):
            raise CorpusError("an object over several lines: `jq -c .` converts the file") from None
        raise
    if not isinstance(record, dict):
        raise CorpusError(f"a JSON {type(record).__name__}, expected an object")
    return record


def _parquet_records(file: CorpusFile, records: RecordOptions) -> Iterator[Numbered]:
    """Yield number and object of each row, with one batch of rows in memory at a time."""
    with needs_extra("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    number = 0
    try:
        open_content(file.path, [b"PAR"]).close()
        with parquet.ParquetFile(file.path) as reader:
            columns = _parquet_columns(reader.schema_arrow.names, records, file.path)
            batches = reader.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            for number, row in enumerate(chain.from_iterable(map(_rows, batches)), start=1):
                yield number, _attempt(f"{file.path}:row {number}", partial(_parquet_record, row))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield number + 1, _broken_off(f"{file.path}:row {number + 1}", error)


def _rows(batch: Any) -> Any:
    """Return the rows of a batch as objects, or as batches of one row if a value cannot be read."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, LookupError):
        return [batch.slice(number, 1) for number in range(batch.num_rows)]


def _parquet_record(row: Any) -> dict[str, Any]:
    record: dict[str, Any] = row if isinstance(row, dict) else row.to_pylist()[0]
    if isinstance(number := record.get("id"), bytes):
        record["id"] = number.decode(errors="backslashreplace")
    return {key: _plain(value) for key, value in record.items()}


def _plain(value: Any, depth: int = 1) -> Any:
    """Return a row with bytes as text, without null keys that structs add within messages: `as_messages` has theirs."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None or depth < 2}
        return {key: _plain(item, depth + 1) for key, item in kept.items()}
    if isinstance(value, list):
        return [_plain(item, depth) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def _parquet_columns(names: Sequence[str], records: RecordOptions, path: Path) -> list[str]:
    """Return the columns to read: those of the text or else the conversation, of the condition, and `id` if present."""
    text = next((name for name in (records.column, *CONVERSATIONS) if name in names), records.column)
    content = [("fields", name) for name in records.pair] if records.pair else [("column", text)]
    wanted = [*content, *(("where", name) for name in records.compared)]
    for option, name in wanted:
        if name not in names:
            found = (option == "column" and advice(names)) or "name another"
            raise CorpusError(f"{path} has no column {name!r}, only {', '.join(names)}: {found}", option)
    return list(dict.fromkeys([*(name for _, name in wanted), *(["id"] * ("id" in names))]))


def _attempt(place: str, make: Callable[[], T]) -> T | RecordProblem:
    """Return the result of `make` for a record, or the record's problem."""
    try:
        return make()
    except json.JSONDecodeError as error:
        return RecordProblem(place, f"not JSON: {error.msg} at character {error.pos + 1}")
    except EOFError as error:
        return _broken_off(place, error)
    except (
        ValueError,
        OverflowError,
        LookupError,
        RecursionError,
        CorpusError,
        TokenizerError,
        *STREAM_ERRORS,
    ) as error:
        return RecordProblem(place, _reason(error))


def _record_document(record: Mapping[str, Any], place: str, how: RecordOptions, render: Render) -> Document:
    key, content = content_of(record, how)
    identity = identify(content)
    text = content if isinstance(content, str) else render(content) if identity.text else ""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CorpusError(f"{key!r} is not valid Unicode: it has an unpaired surrogate") from None
    return Document(record_id(record) or place, text, identity)


def content_of(record: Mapping[str, Any], records: RecordOptions = TEXTS) -> tuple[str, str | list[Message]]:
    """Return the key of a record's content, and its text or conversation.

    CorpusError if it has none, or one that is neither text nor a list; TokenizerError as from `as_messages`.
    """
    if pair := records.pair:
        return pair[1], joined(record, pair)
    key = next((key for key in (records.column, *CONVERSATIONS) if key in record), None)
    if key is None:
        found = advice(record) or "name another column"
        raise CorpusError(f"has neither {records.column!r} nor 'messages': {found}")
    content = _text_or_list(record, key)
    return key, content if isinstance(content, str) else as_messages(content, key)


def joined(record: Mapping[str, Any], pair: tuple[str, str]) -> str | list[Message]:
    """Return a prompt and its output: one text if both are texts, else one conversation; errors as in `content_of`."""
    prompt, output = (_text_or_list(record, key) for key in pair)
    if isinstance(prompt, str) and isinstance(output, str):
        return prompt + output
    messages = list[Message]()
    for key, role, said in zip(pair, ("user", "assistant"), (prompt, output), strict=True):
        turns = [{"role": role, "content": said}] if isinstance(said, str) else said
        messages += as_messages(turns, key)
    return messages


def _text_or_list(record: Mapping[str, Any], key: str) -> str | list[Any]:
    if key not in record:
        raise CorpusError(f"has no {key!r}, only {', '.join(record)}")
    content = record[key]
    if not isinstance(content, str | list):
        raise CorpusError(f"{key!r} is {type_name(content)}, expected text or a list of messages")
    return content


def record_id(record: Mapping[str, Any]) -> str | None:
    """Return a record's id, or None."""
    found = record.get("id")
    named = isinstance(found, str | int) and not isinstance(found, bool) and found != ""
    return str(found) if named else None


def _reason(error: Exception) -> str:
    """Return an error's message, or its type if that is empty; for an OSError, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
