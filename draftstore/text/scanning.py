"""Scanning: the documents of a collection's sources, where only files that changed are read."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftstore.errors import CorpusError, counted, needs_extra
from draftstore.storage.report import ReadReport
from draftstore.text.corpus import read_files
from draftstore.text.digests import digest_keys, text_digest
from draftstore.text.identity import file_identity
from draftstore.text.records import CorpusFile, Document
from draftstore.text.scans import Scan, ScannedFile, digests_of, open_scan, schema, write_scan
from draftstore.text.sources import Source

OnScan: TypeAlias = Callable[[int, int, int], None]
"""Called with the files scanned, their total, and the documents read so far."""
PART_ROWS = 1 << 16


def scan_sources(
    sources: Sequence[Source],
    path: Path,
    *,
    now: float | None = None,
    on_progress: OnScan = lambda _done, _all, _documents: None,
) -> Scan:
    """Scan sources, and keep the result for the next time.

    A file whose content and way of reading are those of the scan before is not read: its rows are taken over. Where a
    text was first seen is kept for as long as some file holds it.

    Args:
        sources: the sources, each with a number of its own.
        path: file of the scan, replaced when all is read.
        now: unix seconds; None: the clock's.
        on_progress: progress callback.

    Raises:
        CorpusError: a source has no files, a file cannot be read, or the scan before; the scan stays as it was.
    """
    with needs_extra("pyarrow"):
        import pyarrow as pa
    seconds = int(time.time() if now is None else now)
    before = open_scan(path)
    old = _Before(before)
    listed = [(source, file) for source in sources for file in source.files()]
    found: dict[int, tuple[ScannedFile, Any]] = {}
    read = documents = 0
    for index in _reading_order(listed):
        source, file = listed[index]
        # Before the reading: a file that grows meanwhile is then read again.
        identity = _identity(file)
        if identity is not None and (known := old.rows(source, file, identity)) is not None:
            found[index] = known
        elif identity is not None:
            found[index] = _read(source, file, identity, old, seconds)
            read += 1
            documents += found[index][0].documents
        on_progress(len(found), len(listed), documents)
    kept = [found[index] for index in sorted(found)]
    rows = pa.concat_tables([schema().empty_table(), *(rows for _, rows in kept)]).combine_chunks()
    files = [file for file, _ in kept]
    return Scan(tuple(sources), tuple(files), write_scan(path, files, rows), read)


def _reading_order(listed: Sequence[tuple[Source, CorpusFile]]) -> list[int]:
    """Return the order in which files are read: those of a log from the newest on."""
    # A log that is rotated meanwhile is then read twice, and not missed.
    order = [index for index, (source, _) in enumerate(listed) if not source.log]
    return order + [index for index in reversed(range(len(listed))) if listed[index][0].log]


def _identity(file: CorpusFile) -> str | None:
    """Return the identity of a file; None if it is gone, as one of a log may be."""
    try:
        return file_identity(file.path)
    except FileNotFoundError:
        return None


class _Before:
    """The scan before: its rows by file, and when each text was first seen."""

    def __init__(self, scan: Scan | None) -> None:
        self._scan = scan
        self._files: dict[tuple[int, str], int] = {}
        self._keys: NDArray[np.bytes_] = np.empty(0, "S16")
        self._seen: NDArray[np.int64] = np.empty(0, np.int64)
        if scan is not None and len(scan.files):
            self._spans = scan.spans().tolist()
            self._files = {(file.source, file.path): index for index, file in enumerate(scan.files)}
            keys, seen = scan.keys, scan.column("first_seen")
            order = np.lexsort((seen, keys))  # the earliest of equal texts first
            keys, seen = keys[order], seen[order]
            first = np.ones(len(keys), np.bool_)
            first[1:] = keys[1:] != keys[:-1]
            self._keys, self._seen = keys[first], seen[first]

    def rows(self, source: Source, file: CorpusFile, identity: str) -> tuple[ScannedFile, Any] | None:
        """Return a file with its rows; None if it must be read."""
        index = self._files.get((source.number, str(file.path)))
        if self._scan is None or index is None:
            return None
        known = self._scan.files[index]
        same = (known.name, known.kind, known.reading, known.identity)
        if same != (file.name, file.kind, source.reading, identity):
            return None
        rows = self._scan.table.slice(self._spans[index], known.documents)
        rows = rows.select(schema().names).replace_schema_metadata(None)
        return known, self.first_seen(rows, 0)

    def first_seen(self, rows: Any, now: int) -> Any:
        """Return rows with the times at which their texts were first seen: new ones now."""
        import pyarrow as pa

        keys = digest_keys(digests_of(rows))
        places = np.searchsorted(self._keys, keys)
        seen = np.full(len(keys), now, np.int64)
        known = places < len(self._keys)
        known[known] = self._keys[places[known]] == keys[known]
        seen[known] = self._seen[places[known]]
        return rows.set_column(rows.schema.get_field_index("first_seen"), "first_seen", pa.array(seen))


def _read(
    source: Source, file: CorpusFile, identity: str, before: _Before, now: int
) -> tuple[ScannedFile, Any]:
    """Read a file of a source into rows."""
    import pyarrow as pa

    report = ReadReport()
    parts = [schema().empty_table(), *_row_parts(source, _documents(source, file, report))]
    rows = before.first_seen(pa.concat_tables(parts).combine_chunks(), now)
    scanned = ScannedFile(
        source.number, str(file.path), file.name, file.kind, source.reading, identity, len(rows),
        dataclasses.asdict(report),
    )  # fmt: skip
    return scanned, rows


def _documents(source: Source, file: CorpusFile, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a file; the last record of a log may be one that is just being written."""
    return read_files(
        [file],
        render=source.render,
        report=report,
        column=source.column,
        strict=source.strict,
        allow_truncated=source.allow_truncated or source.log,
    )


def _row_parts(source: Source, documents: Iterator[Document]) -> Iterator[Any]:
    """Yield the rows of documents, a part at a time; Python's objects take ten times the memory of a table."""
    import pyarrow as pa

    while part := [_row(source, document) for document in islice(documents, PART_ROWS)]:
        columns = zip(zip(*part, strict=True), schema(), strict=True)
        yield pa.Table.from_arrays(
            [pa.array(values, field.type) for values, field in columns], schema=schema()
        )


def _row(source: Source, document: Document) -> tuple[bytes, str, int, int, int, bool]:
    """Return the row of a document as `schema` has it, without the time when it was first seen."""
    text = document.text
    refused = any(fragment.occurs_in(text) for fragment in source.refused)
    return text_digest(text), document.id, len(text), len(text.encode("utf-8", "surrogatepass")), 0, refused


def documents_of(scan: Scan, digests: NDArray[np.uint8]) -> Iterator[Document]:
    """Yield the documents with these digests, each once, in the order of the scan; only their files are read.

    Args:
        scan: a scan with its sources.
        digests: uint8 [any, 16].

    Raises:
        CorpusError: a file changed since the scan, so that documents are missing, or it cannot be read.
    """
    sources = {source.number: source for source in scan.sources}
    keys, wanted = scan.keys, digest_keys(digests)
    first = np.zeros(len(keys), np.bool_)
    first[np.unique(keys, return_index=True)[1]] = True
    first &= np.isin(keys, wanted)
    spans = scan.spans()
    missing = len(np.unique(wanted))
    for index, file in enumerate(scan.files):
        rows = slice(*spans[index : index + 2])
        left = set(keys[rows][first[rows]].tolist())
        if not left:
            continue
        source = sources[file.source]
        for document in _documents(source, CorpusFile(Path(file.path), file.name, file.kind), ReadReport()):
            # numpy drops the zeros at the end of bytes
            key = text_digest(document.text).rstrip(b"\0")
            if key in left:
                left.remove(key)
                missing -= 1
                yield document
            if not left:
                break
    if missing:
        raise CorpusError(
            f"{counted(missing, 'document')} of the scan are no longer in their files: scan again"
        )
