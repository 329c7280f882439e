"""A scan: the table of a collection's documents, as one Parquet file; only files that changed are read again.

    digest       16 bytes, of the document; this and the next three as in draftstore.text.digests
    text         16 bytes, of its text; null if that is blank
    answer       16 bytes, of its last answer; null without one
    beginnings   16 bytes each, of its beginnings that end in an answer
    source       i32, number of the source
    file         i32, index into the files listed in the metadata
    id           the document's id
    characters   i64, length of the text
    bytes        i64, the same in UTF-8
    first_seen   i64, unix seconds of the first of the consecutive scans that found the document
    refused      bool, whether it contains a text that no document may contain

There is a row for every document with text, in the order of sources and of reading, including duplicates: one may
outlive the other. The texts themselves are not stored.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from draftstore.errors import CorpusError, EarlierVersionError, counted, needs_extra
from draftstore.storage.files import AnyText, escaped, file_identity, load_json, replacing
from draftstore.storage.report import HIDDEN, LINKS, OnProgress, ReadReport, ignore
from draftstore.text.corpus import Source, group_files, read_files
from draftstore.text.digests import DIGEST_BYTES, IDENTITY, answer_digest, digest_keys, split_digests
from draftstore.text.fragments import Finder
from draftstore.text.records import CorpusFile, Document

with needs_extra("polars"):
    import polars as pl

METADATA = f"draftstore.scan.{IDENTITY + 1}"
MODE = 0o600
"""Document ids, and who said what how often, are as private as the texts."""
PART_ROWS = 1 << 16
ROWS: dict[str, Any] = {
    "digest": pl.Binary,
    "text": pl.Binary,
    "answer": pl.Binary,
    "beginnings": pl.List(pl.Binary),
    "id": pl.String,
    "characters": pl.Int64,
    "bytes": pl.Int64,
    "refused": pl.Boolean,
}
"""The columns obtained by reading a file."""
COLUMNS = ROWS | {"source": pl.Int32, "file": pl.Int32, "first_seen": pl.Int64}


@dataclass(frozen=True)
class ScannedFile:
    """A file as it was read: `identity` is that of its content, `documents` the number of its rows."""

    source: int
    path: AnyText
    name: AnyText
    kind: str
    reading: str
    identity: str
    documents: int
    report: ReadReport

    @property
    def content(self) -> tuple[int | str, ...]:
        """Everything that determines its rows."""
        return self.source, self.path, self.name, self.kind, self.reading, self.identity


FILES = TypeAdapter(tuple[ScannedFile, ...])


@dataclasses.dataclass(frozen=True)
class Scan:
    """A table of documents: its files in the order of reading, and their rows, those of a file adjacent.

    A scan opened from its file has no sources. `read` files were read, the rows of the others reused; `skipped` are the
    numbers of `LINKS` and `HIDDEN` that were found.
    """

    sources: tuple[Source, ...]
    files: tuple[ScannedFile, ...]
    frame: pl.DataFrame
    read: int = 0
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.frame.height

    @property
    def digests(self) -> NDArray[np.uint8]:
        """Digests of the documents, uint8 [n, 16]."""
        return digests_of(self.frame)

    @property
    def keys(self) -> NDArray[np.bytes_]:
        """Digests as S16 [n]; see `draftstore.text.digests.digest_keys`."""
        return digest_keys(self.digests)

    @property
    def report(self) -> ReadReport:
        """What was read and skipped in all files."""
        report = ReadReport(passed_over=dict(self.skipped))
        for file in self.files:
            report.add(file.report)
        return report

    def require_documents(self, name: str) -> None:
        """Raise a CorpusError if nothing but bad records and those filtered out was found in the collection `name`."""
        report = self.report
        if not len(self) and (report.bad_records or report.filtered):
            option = "--column KEY" if report.bad_records else "--where SQL"
            advice = (
                f"correct the files, or add the place again, `draftstore corpus add {name} PLACE {option}`"
            )
            raise CorpusError(f"no document of {name} can be read: {report.absence()}: {advice}")

    def rows(self) -> dict[tuple[int | str, ...], tuple[ScannedFile, pl.DataFrame]]:
        """Return each file with its rows, keyed by `ScannedFile.content`."""
        starts = np.cumsum([0, *(file.documents for file in self.files)]).tolist()
        rows = self.frame.select(list(ROWS))
        return {
            file.content: (file, rows.slice(start, file.documents))
            for file, start in zip(self.files, starts, strict=False)
        }

    def column(self, name: str) -> NDArray[Any]:
        """Return a numeric column, [n]."""
        return self.frame[name].to_numpy()


def digests_of(frame: pl.DataFrame) -> NDArray[np.uint8]:
    """Return the digests of a table, uint8 [n, 16]."""
    half = DIGEST_BYTES // 2
    words = [
        frame["digest"].bin.slice(start, half).bin.reinterpret(dtype=pl.UInt64, endianness="little")
        for start in (0, half)
    ]
    return np.stack(words, axis=1).view(np.uint8)


def digest_series(digests: bytes) -> pl.Series:
    """Return digests, one after the other, as a column of a table."""
    return pl.Series("digest", list(split_digests(digests)), pl.Binary)


def open_scan(path: Path) -> Scan | None:
    """Open a scan; return None if there is none yet. CorpusError if it is damaged, or of an earlier version."""
    if not path.exists():
        return None
    require_current(path)
    try:
        files = load_json(pl.read_parquet_metadata(path)[METADATA], FILES)
        frame = pl.read_parquet(path).select(pl.col(name).cast(kind) for name, kind in COLUMNS.items())
        whole = sum(file.documents for file in files) == frame.height
        problem = None if whole else "its numbers of rows and of documents differ"
    except (pl.exceptions.PolarsError, OSError, KeyError, ValueError) as error:
        problem = str(error)
    if problem:
        raise CorpusError(
            f"the scan {path} cannot be read ({problem}): remove it; all documents then count as first seen now"
        )
    return Scan((), files, frame)


def require_current(path: Path) -> None:
    """Raise EarlierVersionError if there is a scan of an earlier version, which knew documents by other digests."""
    with suppress(pl.exceptions.PolarsError, OSError):
        keys = [key for key in pl.read_parquet_metadata(path) if key.startswith("draftstore.scan.")]
        if keys and METADATA not in keys:
            raise EarlierVersionError(f"the scan {path} is of an earlier version")


def scan_sources(
    sources: Sequence[Source],
    path: Path,
    *,
    now: float | None = None,
    on_progress: OnProgress = ignore,
) -> Scan:
    """Scan sources, and save the result for the next scan.

    A file whose content and reading options are unchanged since the previous scan is not read: its rows are reused. The
    time when a document was first seen is kept as long as some file contains it, bounded by the clock and the source.

    Args:
        sources: the sources, with distinct numbers.
        path: file of the scan, replaced once everything has been read.
        now: unix seconds; None: the current time.

    CorpusError if a source has no files, or a file or the previous scan cannot be read; the saved scan is unchanged.
    """
    before = open_scan(path) or Scan((), (), pl.DataFrame(schema=COLUMNS))
    listing = ReadReport()
    listed = [(source, file) for source in sources for file in source.files(listing)]
    found: dict[int, tuple[ScannedFile, pl.DataFrame]] = {}
    read = documents = 0
    known = before.rows()
    # Log files last, the newest first: one that is rotated meanwhile is then read twice instead of missed.
    logs = [at for at, (source, _) in enumerate(listed) if source.log]
    others = [at for at, (source, _) in enumerate(listed) if not source.log]
    for at in [*others, *reversed(logs)]:
        source, file = listed[at]
        # Before reading: a file that grows meanwhile is read again next time. A file of a log may be gone.
        with suppress(FileNotFoundError):
            identity = file_identity(file.path)
            content = source.number, str(file.path), file.name, file.kind, source.reading, identity
            if content not in known:
                report = ReadReport()
                rows = _read(source, file, report)
                known[content] = ScannedFile(*content, rows.height, report), rows
                read += 1
                documents += rows.height
            found[at] = known[content]
        on_progress(len(found), len(listed), f"{counted(documents, 'document')} read")
    kept = [found[at] for at in sorted(found)]
    frame = _table(kept, before.frame, sources, int(time.time() if now is None else now))
    files = tuple(file for file, _ in kept)
    notes = json.dumps([dataclasses.asdict(file) for file in files])
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, MODE) as filling:
        frame.write_parquet(filling, metadata={METADATA: notes})
    skipped = {what: number for what, number in listing.passed_over.items() if what in (LINKS, HIDDEN)}
    return Scan(tuple(sources), files, frame, read, skipped)


def _table(
    kept: Sequence[tuple[ScannedFile, pl.DataFrame]],
    before: pl.DataFrame,
    sources: Sequence[Source],
    now: int,
) -> pl.DataFrame:
    """Return the rows of files with the times at which their texts were first seen: now for new texts.

    No time is later than now or earlier than the addition of the source: errors of a wrong clock do not persist.
    """
    added = {source.number: source.added for source in sources}
    rows = pl.concat([
        pl.DataFrame(schema=ROWS | {"source": pl.Int32, "file": pl.Int32, "added": pl.Int64}),
        *(
            rows.with_columns(
                pl.lit(file.source, pl.Int32).alias("source"),
                pl.lit(place, pl.Int32).alias("file"),
                pl.lit(added[file.source], pl.Int64).alias("added"),
            )
            for place, (file, rows) in enumerate(kept)
        ),
    ])  # fmt: skip
    seen = before.group_by("digest").agg(pl.col("first_seen").min())
    first, least = pl.col("first_seen").fill_null(now), pl.col("added")
    # A clock earlier than the addition of the source is itself wrong, and cannot correct known times.
    first = pl.when(least <= now).then(pl.min_horizontal(first, now)).otherwise(first)
    rows = rows.join(seen, "digest", "left", maintain_order="left")
    return rows.with_columns(pl.max_horizontal(first, least).alias("first_seen")).select(list(COLUMNS))


def _read(source: Source, file: CorpusFile, report: ReadReport) -> pl.DataFrame:
    """Read a file of a source into rows, a part at a time: Python objects take ten times the memory of a table."""
    refused, parts = Finder(source.refused), [pl.DataFrame(schema=ROWS)]
    rows = (_row(source, document, refused) for document in _documents(source, file, report))
    while part := list(islice(rows, PART_ROWS)):
        parts.append(pl.DataFrame(part, ROWS, orient="row"))
    return pl.concat(parts)


def _documents(source: Source, file: CorpusFile, report: ReadReport) -> Iterator[Document]:
    """Yield the documents of a file; the last record of a log may still be incomplete."""
    return read_files(
        [file], render=source.render, report=report, records=source.records, strict=source.strict,
        allow_truncated=source.allow_truncated or source.log, read=source.read,
    )  # fmt: skip


def _row(source: Source, document: Document, refused: Finder) -> tuple[Any, ...]:
    text = document.text
    identity = document.identity
    if source.log and source.find is None and identity.answer is None:  # a prompt and its answer
        identity = identity._replace(answer=answer_digest(text))
    size = len(text.encode("utf-8", "surrogatepass"))
    return *identity, escaped(document.id), len(text), size, refused(text)


def documents_of(scan: Scan, digests: NDArray[np.uint8]) -> Iterator[Document]:
    """Yield the documents with these digests, uint8 [any, 16], each once, in the order of the scan; see `groups_of`."""
    return chain.from_iterable(group() for group in groups_of(scan, digests))


def groups_of(scan: Scan, digests: NDArray[np.uint8]) -> list[Callable[..., Iterator[Document]]]:
    """Return readers of the same documents, each of a group of files (`draftstore.text.corpus.group_files`).

    Only their files are read. CorpusError if one cannot be read, or changed since the scan so that some are missing.
    """
    sources = {source.number: source for source in scan.sources}
    wanted = digest_series(digests.tobytes()).unique()
    first = scan.frame.unique("digest", keep="first", maintain_order=True)
    first = first.filter(pl.col("digest").is_in(wanted.implode()))
    rows = first.group_by("file", maintain_order=True).agg("digest").rows()
    parts = iter([(sources[scan.files[place].source], set(texts)) for place, texts in rows])
    read = [
        CorpusFile(Path(file.path), file.name, file.kind) for file in (scan.files[place] for place, _ in rows)
    ]
    groups = group_files(read)
    return [partial(_documents_in, [*zip(group, islice(parts, len(group)), strict=True)]) for group in groups]


def _documents_in(
    parts: Sequence[tuple[CorpusFile, tuple[Source, set[bytes]]]], **_: object
) -> Iterator[Document]:
    """Yield some documents of some files. Sources render conversations themselves, and were reported by the scan."""
    missing = 0
    for file, (source, digests) in parts:
        left = set(digests)
        for document in _documents(source, file, ReadReport()):
            if (digest := document.identity.document) in left:
                left.remove(digest)
                yield document
            if not left:
                break
        missing += len(left)
    if missing:
        raise CorpusError(
            f"{counted(missing, 'document')} of the scan could not be found in the files: scan again"
        )
