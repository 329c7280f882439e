"""A scan: the table of a collection's documents, as one Parquet file.

    digest       16 bytes, see draftstore.text.digests
    source       i32, number of the source
    file         i32, index among the files that the file's metadata name
    id           the document's id
    characters   i64, length of the text
    bytes        i64, the same in UTF-8
    first_seen   i64, unix seconds of the first scan in a row that found the text
    refused      bool, whether it contains a text that no document may contain

A row for every document with text, in the order of reading, equal ones included: one of them may outlive the other. No
text is in it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError, needs_extra
from draftstore.storage.files import replacing
from draftstore.storage.report import ReadReport
from draftstore.text.digests import DIGEST_BYTES, digest_keys
from draftstore.text.sources import Source

VERSION = 1
METADATA = b"draftstore.scan"
MODE = 0o600
"""Ids of documents, and who said what how often, are as private as the texts."""


@dataclasses.dataclass(frozen=True)
class ScannedFile:
    """A file as it was read.

    Attributes:
        source: number of its source.
        path: path of the file.
        name: its name in document ids.
        kind: `lines`, `parquet` or `text`.
        reading: see `Source.reading`.
        identity: its content, see `draftstore.text.identity`.
        documents: number of its rows.
        report: what was passed over in it, as `ReadReport` has it.
    """

    source: int
    path: str
    name: str
    kind: str
    reading: str
    identity: str
    documents: int
    report: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Scan:
    """A table of documents.

    Attributes:
        sources: the sources that were scanned; none in a scan that was opened from its file.
        files: their files, in the order of reading.
        table: the rows, a table of pyarrow; those of a file are adjacent.
        read: how many files this scan has read; the rows of others were taken over.
    """

    sources: tuple[Source, ...]
    files: tuple[ScannedFile, ...]
    table: Any
    read: int = 0

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def digests(self) -> NDArray[np.uint8]:
        """Uint8 [n, 16]."""
        return digests_of(self.table)

    @property
    def keys(self) -> NDArray[np.bytes_]:
        """S16 [n], see `draftstore.text.digests.digest_keys`."""
        return digest_keys(self.digests)

    @property
    def report(self) -> ReadReport:
        """What was passed over in all files."""
        report = ReadReport()
        for file in self.files:
            part = ReadReport.of_notes(file.report)
            report.add(part)
            report.unread += part.unread
        return report

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers, [n]."""
        column: NDArray[Any] = self.table.column(name).to_numpy()
        return column

    def ids(self) -> list[str]:
        """Return the ids of all documents."""
        ids: list[str] = self.table.column("id").to_pylist()
        return ids

    def spans(self) -> NDArray[np.int64]:
        """Int64 [files + 1], the first row of every file, and the end."""
        return np.cumsum([0, *(file.documents for file in self.files)], dtype=np.int64)


def digests_of(table: Any) -> NDArray[np.uint8]:
    """Return the digests of a table, uint8 [n, 16]."""
    chunks = [chunk for chunk in table.column("digest").chunks if len(chunk)]
    parts = [
        np.frombuffer(chunk.buffers()[1], np.uint8)[chunk.offset * DIGEST_BYTES :][
            : len(chunk) * DIGEST_BYTES
        ]
        for chunk in chunks
    ]
    flat = np.concatenate([np.empty(0, np.uint8), *parts])
    return flat.reshape(-1, DIGEST_BYTES)


def schema() -> Any:
    """Return the columns of a file's rows; `source` and `file` join them in the file."""
    with needs_extra("pyarrow"):
        import pyarrow as pa
    return pa.schema(
        [
            ("digest", pa.binary(DIGEST_BYTES)),
            ("id", pa.string()),
            ("characters", pa.int64()),
            ("bytes", pa.int64()),
            ("first_seen", pa.int64()),
            ("refused", pa.bool_()),
        ]
    )


def write_scan(path: Path, files: list[ScannedFile], rows: Any) -> Any:
    """Write a scan atomically, readable by its owner only, and return its table."""
    import pyarrow as pa
    from pyarrow import parquet

    counts = [file.documents for file in files]
    places = np.repeat(np.arange(len(files), dtype=np.int32), counts)
    numbers = np.repeat(np.array([file.source for file in files], np.int32), counts)
    table = rows.add_column(1, "source", pa.array(numbers)).add_column(2, "file", pa.array(places))
    facts = {"version": VERSION, "files": [dataclasses.asdict(file) for file in files]}
    table = table.replace_schema_metadata({METADATA: json.dumps(facts).encode(errors="backslashreplace")})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, MODE) as filling:
        parquet.write_table(table, filling, compression="zstd")
    return table


def open_scan(path: Path) -> Scan | None:
    """Open a scan; None if there is none yet.

    Raises:
        CorpusError: it cannot be read.
    """
    with needs_extra("pyarrow"):
        import pyarrow as pa
        from pyarrow import parquet
    if not path.exists():
        return None
    try:
        table = parquet.read_table(path).combine_chunks()
        files = _files_of(table)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(
            f"the scan {path} cannot be read ({error}): remove it; all documents then count as seen now"
        ) from None
    return Scan((), files, table)


def _files_of(table: Any) -> tuple[ScannedFile, ...]:
    """Return the files that a table's metadata name."""
    facts = json.loads((table.schema.metadata or {})[METADATA])
    if facts["version"] != VERSION:
        raise ValueError(f"version {facts['version']!r}, expected {VERSION}")
    files = tuple(ScannedFile(**file) for file in facts["files"])
    if sum(file.documents for file in files) != table.num_rows:
        raise ValueError("its files do not have as many documents as it has rows")
    return files
